"""Tests of request fields without a server: for any value, a field is rejected with ValueError or accepted by the
scheduler. server/test_server_requests.py shows that accepted requests are served."""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.managers.io_struct import (
    BatchTokenizedGenerateReqInput,
    GenerateReqInput,
    TokenizedGenerateReqInput,
    msgpack_decode,
    msgpack_encode,
)
from sglang.srt.sampling.sampling_params import SamplingParams

from dsv4_sglang.srt.integration.request_validation import MAX_ANSWERS, check_fields, check_message

VOCABULARY = 384
MANAGER = SimpleNamespace(model_config=SimpleNamespace(vocab_size=VOCABULARY), enable_metrics=False)
SGLANGS_OWN = inspect.unwrap(GenerateReqInput.normalize_batch_and_arguments)

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.sampled_from([-1, 0, 1, VOCABULARY - 1, VOCABULARY, 1 << 31, 1 << 63]),
    st.floats(),
    st.text(st.characters(categories=None)),
)
# Any JSON value, including lone surrogates and numbers beyond 64 bits.
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
)

# Fields that SGLang fills. Clients do not send them.
OBJECTS = ("time_stats", "mm_inputs", "mm_data_mooncake", "sampling_params", "positional_embed_overrides")


def tokenized(params: SamplingParams | None = None, **fields: Any) -> TokenizedGenerateReqInput:
    if params is None:
        params = SamplingParams()
        params.normalize(None)
    usual: dict[str, Any] = {
        **dict.fromkeys(("input_text", "input_embeds", "mm_inputs", "token_type_ids", "token_ids_logprob")),
        "rid": "x",
        "input_ids": array("q", [5]),
        "return_logprob": False,
        "stream": False,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
    }
    return TokenizedGenerateReqInput(**{**usual, "sampling_params": params, **fields})


def send(*requests: TokenizedGenerateReqInput) -> None:
    sent: list[Any] = []
    for message in (*requests, BatchTokenizedGenerateReqInput(batch=list(requests))):
        check_message(lambda manager, obj: sent.append(obj), MANAGER, message)
    for message in sent:
        msgpack_decode(msgpack_encode(message))


def sent(**fields: Any) -> None:
    send(tokenized(**fields))


def normalize(**fields: Any) -> GenerateReqInput:
    request = GenerateReqInput(**{"input_ids": [5], **fields})
    check_fields(SGLANGS_OWN, request)
    return request


@pytest.mark.parametrize("name", SamplingParams.__struct_fields__)
@settings(max_examples=40)
@given(value=VALUES)
def test_sampling_parameters(name: str, value: Any) -> None:
    with suppress(ValueError):
        request = normalize(sampling_params={name: value})
        params = SamplingParams(**(request.sampling_params if request.is_single else request.sampling_params[0]))
        params.normalize(None)
        params.verify(VOCABULARY)
        send(tokenized(params))


@pytest.mark.parametrize("name", [name for name in TokenizedGenerateReqInput.__struct_fields__ if name not in OBJECTS])
@settings(max_examples=40)
@given(value=VALUES)
def test_fields(name: str, value: Any) -> None:
    with suppress(ValueError):
        send(tokenized(**{name: value}))


@pytest.mark.parametrize("ids", [[], [-1], [5, VOCABULARY], [(1 << 63) - 1]])
def test_tokens_that_the_model_has_not(ids: list[int]) -> None:
    send(tokenized(input_ids=array("q", [0, VOCABULARY - 1])))
    with pytest.raises(ValueError, match=r"^input_ids is .*; expected "):
        send(tokenized(), tokenized(input_ids=array("q", ids)))


def test_labels_of_metrics() -> None:
    def check(labels: dict[str, str] | None) -> None:
        states = {"x": SimpleNamespace(obj=SimpleNamespace(custom_labels=labels))}
        metrics = SimpleNamespace(labels={"model_name": "m", "tenant": ""})
        known = {**vars(MANAGER), "enable_metrics": True, "metrics_collector": metrics, "rid_to_state": states}
        check_message(lambda manager, obj: None, SimpleNamespace(**known), tokenized())

    check(None)
    check({"tenant": "x"})
    with pytest.raises(ValueError, match=r"^a name in custom_labels is 'tenants'; expected "):
        check({"tenants": "x"})


@pytest.mark.parametrize(
    ("check", "fields", "message"),
    [
        (sent, {"extra_key": ["a"]}, "extra_key is ['a']: Expected `str | null`, got `array`"),
        (
            sent,
            {"return_logprob": True, "logprob_start_len": -5},
            "logprob_start_len is -5; expected -1 to 1, the number of tokens of the prompt",
        ),
        (
            sent,
            {"return_logprob": True, "logprob_start_len": 2},
            "logprob_start_len is 2; expected -1 to 1, the number of tokens of the prompt",
        ),
        (
            sent,
            {"top_logprobs_num": VOCABULARY + 1},
            "top_logprobs_num is 385; expected 0 to 384, the number of tokens of the model",
        ),
        (sent, {"params": SamplingParams(top_k=1 << 31)}, "top_k is 2147483648; expected -1, or 1 to 2147483647"),
        # Before SGLang looks at the request.
        (normalize, {"sampling_params": {"n": MAX_ANSWERS + 1}}, "n is 1025; expected 1 to 1024"),
        (normalize, {"sampling_params": {"n": 0}}, "n is 0; expected 1 to 1024"),
        (normalize, {"sampling_params": {"top_k": 1.5}}, "top_k is 1.5: Expected `int`, got `float`"),
        (
            normalize,
            {"sampling_params": {"stop_regex": "("}},
            "stop_regex is '(': missing ), unterminated subpattern at position 0",
        ),
        (normalize, {"sampling_params": [{}]}, "sampling_params is [{}]; expected an object for one prompt"),
        (normalize, {"rid": ["a"]}, "rid is ['a']; expected a string for one prompt"),
        (normalize, {"text": "a"}, "text and input_ids are both given; expected one of them"),
        (
            normalize,
            {"input_ids": [[5], [6]], "return_logprob": [True]},
            "return_logprob is [True]; expected one item for each of 2 prompts",
        ),
    ],
)
def test_one_line(check: Callable[..., object], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        check(**fields)
    assert str(error.value) == message
