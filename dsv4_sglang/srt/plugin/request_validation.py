"""Validation of request fields in the HTTP process, before a request is sent to the scheduler.

SGLang's scheduler trusts most values. A value that it cannot serve raises an exception there, which ends the whole
server. Each check here raises ValueError with one line, which SGLang returns with status 400.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, get_args, get_type_hints

import msgspec
import numpy as np
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST, DisaggregationMode

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.features.hints import check_hints, take_from_custom_params

# Maximum answers per prompt (`n`). SGLang creates a state for each before it generates the first.
MAX_ANSWERS = 1024
# Maximum bias of a logit. Beyond the range of float32 the probabilities would be NaN, and sampling would crash.
MAX_BIAS = 1e9
# Logits are divided by it, and the quotients must be finite.
MIN_REPETITION_PENALTY = 1e-6
# Limit of int32, the dtype of SGLang's tensor. SGLang uses 1 << 30 for "all tokens".
MAX_TOP_K = (1 << 31) - 1
# Fields of SamplingParams that SGLang derives from others.
SET_BY_SGLANG = ("stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized")
# Fields of a request that must not be given, with the reasons. SGLang would ignore most of them.
NOT_SERVED = {
    "input_embeds": "the model looks tokens up in its own embedding; give input_ids or text",
    "positional_embed_overrides": "the model looks tokens up in its own embedding; leave it out",
    "image_data": "the model takes text only",
    "video_data": "the model takes text only",
    "audio_data": "the model takes text only",
    "modalities": "the model takes text only",
    "session_params": "sessions have not been tested with this cache; leave it out",
    "lora_id": "adapters have not been tested with this cache; leave it out",
    "multi_item_delimiter_indices": "this cache's backend has no attention mask that keeps items apart; leave it out",
    "token_indices_to_pool": "the model serves tokens, not embeddings; leave it out",
    "http_worker_ipc": "SGLang sets it to where an answer goes; leave it out",
}

# Values that mean the same as none. With several prompts or answers SGLang would repeat them and reject the request.
EMPTY: dict[str, Any] = {"lora_path": "", "kv_hints": {}}

# Fields that a router sets for a pair of prefill and decode servers. On another server a request with `bootstrap_host`
# would never end: SGLang does not cache what it has computed, and computes its first chunk again and again.
OF_DISAGGREGATION = (
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "decode_tp_size",
    "disagg_prefill_dp_rank",
)


def _invalid(name: str, value: object, expected: str) -> ValueError:
    return ValueError(f"{name} is {reprlib.repr(value)}; expected {expected}")


# Before SGLang processes a request


def check_origin(original: Callable[..., Any], manager: Any, obj: Any, request: Any = None) -> Any:
    """AROUND TokenizerManager.generate_request, an asynchronous generator: check what depends on the server and on the
    HTTP `request`, which is None in a program that builds SGLang's engine."""
    rids = obj.rid if isinstance(obj.rid, list) else [obj.rid]
    # SGLang's own health checks are the only requests that come with GET.
    if request is not None and request.method != "GET":
        for rid in rids:
            if isinstance(rid, str) and rid.startswith(HEALTH_CHECK_RID_PREFIX):
                raise _invalid("rid", rid, f"an id that does not begin with {HEALTH_CHECK_RID_PREFIX}")
    if manager.disaggregation_mode is DisaggregationMode.NULL:
        for name in OF_DISAGGREGATION:
            if (value := getattr(obj, name, None)) is not None:
                raise _invalid(name, value, "nothing: this server has no --disaggregation-mode")
    return original(manager, obj, request)


def check_fields(original: Callable[..., None], request: Any) -> None:
    """AROUND GenerateReqInput.normalize_batch_and_arguments, which copies fields for each prompt and answer: check the
    fields before and after it."""
    take_from_custom_params(request)
    _check_given(request)
    original(request)
    _check_lengths(request)


def _check_given(request: Any) -> None:
    for name, reason in NOT_SERVED.items():
        value = getattr(request, name, None)
        if value in ([], {}):
            # The same as no value, but SGLang would look for an item of each prompt.
            setattr(request, name, None)
        elif value is not None:
            raise ValueError(f"{name} is {reprlib.repr(value)}, which is not supported: {reason}")
    for name, empty in EMPTY.items():
        if getattr(request, name) == empty:
            setattr(request, name, None)
    if request.text is not None and request.input_ids is not None:
        raise ValueError("text and input_ids are both given; expected one of them")
    params = request.sampling_params
    for given in params if isinstance(params, list) else () if params is None else (params,):
        _check_sampling(given)
    if isinstance(params, list) and not params:
        raise _invalid("sampling_params", params, "an object, or one for each prompt")


@cache
def _types_of_sampling() -> dict[str, Any]:
    """Return the type of each sampling parameter that a client may set."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    hints = get_type_hints(SamplingParams)
    return {name: hints[name] for name in SamplingParams.__struct_fields__ if name not in SET_BY_SGLANG}


def _check_sampling(given: Any) -> None:
    if not isinstance(given, dict):
        raise _invalid("sampling_params", given, "an object, or one for each prompt")
    types = _types_of_sampling()
    for name, value in given.items():
        if name not in types:
            raise _invalid("a field of sampling_params", name, f"one of {', '.join(types)}")
        if value is None:
            continue  # its default
        try:
            msgspec.convert(value, types[name])
        except msgspec.ValidationError as error:
            raise ValueError(f"{name} is {reprlib.repr(value)}: {error}") from None
    n = given.get("n", 1)
    if n is None or not 1 <= n <= MAX_ANSWERS:
        raise _invalid("n", n, f"1 to {MAX_ANSWERS}")
    if (given.get("beam_width") or 1) != 1:
        raise _invalid("beam_width", given["beam_width"], "1: beams have not been tested with this cache")
    _check_stops(given)


def _check_stops(given: dict[str, Any]) -> None:
    """Check the stop strings and patterns, which SGLang tokenizes and compiles."""
    for name in ("stop", "stop_regex"):
        texts = given.get(name) or ()
        for text in (texts,) if isinstance(texts, str) else texts:
            try:
                text.encode()
                if name == "stop_regex":
                    re.compile(text)
            except (UnicodeEncodeError, re.error, RecursionError, OverflowError) as error:
                raise ValueError(f"{name} is {reprlib.repr(text)}: {error}") from None


def _check_lengths(request: Any) -> None:
    """Check that lists have one item per prompt, or one per answer. SGLang would read beyond a shorter list and ignore
    the rest of a longer one."""
    if request.is_single:
        if not isinstance(request.rid, str):
            raise _invalid("rid", request.rid, "a string for one prompt")
        if isinstance(request.sampling_params, list):
            raise _invalid("sampling_params", request.sampling_params, "an object for one prompt")
        return
    prompts, read = request.batch_size, len(request.rid)
    for field in dataclasses.fields(request):
        value = getattr(request, field.name)
        if not isinstance(value, list):
            continue
        if len(value) < read or len(value) not in (prompts, prompts * request.parallel_sample_num):
            raise _invalid(field.name, value, f"one item for each of {prompts} prompts")


# Messages to the scheduler


def check_message(original: Callable[..., None], manager: Any, obj: Any) -> None:
    """AROUND `targets.SEND_TO_SCHEDULER`, which sends every request of a process: check the message `obj` first. Raise
    ValueError for an invalid field."""
    for request in _requests_of(obj):
        _check_types(request)
        if manager.enable_metrics:
            _check_labels(manager, request.rid)
        for name, value, expected in _invalid_values(request, manager.model_config.vocab_size):
            raise _invalid(name, value, expected)
        check_hints(manager, request.kv_hints)
        _ask_for_no_mask(manager, request)
    original(manager, obj)


def _ask_for_no_mask(manager: Any, request: Any) -> None:
    """Drop `return_sampling_mask` of a request that samples nothing, because SGLang would fail without a mask.

    With `n` above 1 SGLang sends such a request first, so that the answers share the prompt.
    """
    if request.return_sampling_mask and request.sampling_params.max_new_tokens == 0:
        request.return_sampling_mask = manager.rid_to_state[request.rid].obj.return_sampling_mask = False


def _check_labels(manager: Any, rid: str) -> None:
    """Check custom labels. An unknown label would end the process that counts the answer, and the server with it."""
    labels = manager.metrics_collector.labels
    for name in manager.rid_to_state[rid].obj.custom_labels or ():
        if name not in labels:
            raise _invalid("a name in custom_labels", name, "one of --tokenizer-metrics-allowed-custom-labels")


def _requests_of(message: Any) -> Iterable[Any]:
    from sglang.srt.managers.io_struct import BatchTokenizedGenerateReqInput, TokenizedGenerateReqInput

    if isinstance(message, BatchTokenizedGenerateReqInput):
        return message.batch
    return (message,) if isinstance(message, TokenizedGenerateReqInput) else ()


def _check_types(request: Any) -> None:
    """Encode and decode a request with SGLang's typed encoding, without sending it, so that wrong types are rejected.

    SGLang's default encoding accepts objects of any type.
    """
    from sglang.srt.managers.io_struct import msgpack_decode, msgpack_encode

    sent = copy.copy(request)
    for name in _objects():
        setattr(sent, name, None)
    try:
        msgpack_decode(msgpack_encode(sent))
    except msgspec.ValidationError as error:
        raise ValueError(_with_name(str(error), request)) from None
    except (OverflowError, TypeError, UnicodeEncodeError) as error:
        raise ValueError(f"a field of the request cannot be sent to the scheduler: {error}") from None


@cache
def _objects() -> list[str]:
    """Return the fields of a request that SGLang pickles. A client sets none of them."""
    from sglang.srt.managers.io_struct import PickleWrapper, TokenizedGenerateReqInput

    hints = get_type_hints(TokenizedGenerateReqInput)
    return [name for name, hint in hints.items() if PickleWrapper in get_args(hint)]


def _with_name(error: str, request: Any) -> str:
    """Return the decoder's error with the name of the field. The message encodes fields as an array, the tag first."""
    place = re.search(r"at `\$\[(\d+)\]", error)
    if place is None:
        return error
    name = request.__struct_fields__[int(place[1]) - 1]
    return f"{name} is {reprlib.repr(getattr(request, name))}: {error[: place.start()].rstrip(' -')}"


def _invalid_values(request: Any, vocabulary: int) -> Iterator[tuple[str, object, str]]:
    """Yield (field, value, expected value) for each value that is out of bounds."""
    ids, params = request.input_ids, request.sampling_params
    in_vocabulary = f"token ids of the model, 0 to {vocabulary - 1}"
    if not ids:
        yield "input_ids", list(ids or ()), "at least one token"
    elif not 0 <= (seen := np.asarray(ids)).min() <= seen.max() < vocabulary:  # a view of SGLang's array, no copy
        yield "input_ids", next(i for i in ids if not 0 <= i < vocabulary), in_vocabulary
    if request.bootstrap_host == FAKE_BOOTSTRAP_HOST and len(ids or ()) > BLOCK:
        # A prompt of more than one chunk would not end, see OF_DISAGGREGATION.
        expected = f"the address of a prefill server; SGLang's checks, of up to {BLOCK} tokens, use this one"
        yield "bootstrap_host", request.bootstrap_host, expected
    if request.return_logprob and not -1 <= request.logprob_start_len <= len(ids):
        yield "logprob_start_len", request.logprob_start_len, f"-1 to {len(ids)}, the number of tokens of the prompt"
    if not 0 <= request.top_logprobs_num <= vocabulary:
        yield "top_logprobs_num", request.top_logprobs_num, f"0 to {vocabulary}, the number of tokens of the model"
    for token in params.stop_token_ids or ():
        if not 0 <= token < vocabulary:
            yield "stop_token_ids", token, in_vocabulary
    if params.top_k > MAX_TOP_K:
        yield "top_k", params.top_k, f"-1, or 1 to {MAX_TOP_K}"
    if params.repetition_penalty < MIN_REPETITION_PENALTY:
        yield "repetition_penalty", params.repetition_penalty, f"at least {MIN_REPETITION_PENALTY}"
    for token, bias in (params.logit_bias or {}).items():
        if not (math.isfinite(bias) and abs(bias) <= MAX_BIAS):
            yield f"logit_bias of token {token}", bias, f"{-MAX_BIAS:g} to {MAX_BIAS:g}"
    if params.stream_interval is not None and params.stream_interval < 1:
        yield "stream_interval", params.stream_interval, "1 or more tokens"
