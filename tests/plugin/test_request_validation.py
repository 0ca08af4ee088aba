"""Tests of request fields without a server: for any value, a field is rejected with ValueError or accepted by the
scheduler. server/test_server_requests.py shows that accepted requests are served."""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Callable
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.io_struct import (
    BatchTokenizedGenerateReqInput,
    GenerateReqInput,
    TokenizedGenerateReqInput,
    msgpack_decode,
    msgpack_encode,
)
from sglang.srt.sampling.sampling_params import SamplingParams

from dsv4_sglang.srt.plugin.request_validation import (
    MAX_ANSWERS,
    NOT_SERVED,
    SET_BY_SGLANG,
    check_fields,
    check_message,
    check_origin,
)

VOCABULARY = 384
MANAGER = SimpleNamespace(model_config=SimpleNamespace(vocab_size=VOCABULARY), enable_metrics=False)
# What SGLang reads of a tokenizer to count the tokens of stop strings.
TOKENIZER = SimpleNamespace(encode=lambda text, **_: [5] * len(text), eos_token_id=1, additional_stop_token_ids=None)
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
OBJECTS = ("time_stats", "mm_inputs", "sampling_params", "positional_embed_overrides", "session_params")


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


# For each field: values that must arrive at the scheduler, and values that must be rejected.
TEXT = ("x", "", None), (1, ["x"], "\ud800")
NUMBER = (0, 7, None), ("x", 1.5, 1 << 70, [1])
SIZE = (0, 1), ("x", 1.5, 1 << 70, None)
FLAG = (True, False), (1, "x", None, [True])
NUMBERS = (None, [], [1]), (1, "x", ["x"], [1 << 70])
FIELDS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    **dict.fromkeys(("rid", "http_worker_ipc", "session_id", "lora_id", "lora_name", "custom_logit_processor"), TEXT),
    **dict.fromkeys(("bootstrap_host", "bootstrap_pair_key", "routing_key", "extra_key", "cache_salt"), TEXT),
    **dict.fromkeys(("bootstrap_port", "bootstrap_room", "decode_tp_size", "routed_dp_rank", "priority"), NUMBER),
    "disagg_prefill_dp_rank": NUMBER,
    **dict.fromkeys(("return_logprob", "stream", "return_sampling_mask", "return_flat_raw_top_logprobs"), FLAG),
    **dict.fromkeys(("return_routed_experts", "return_indexer_topk", "require_reasoning", "no_logs"), FLAG),
    **dict.fromkeys(("return_bytes", "return_entropy", "pp_prefetch_ticketed"), FLAG),
    **dict.fromkeys(("logprob_start_len", "routed_experts_start_len"), SIZE),
    **dict.fromkeys(("token_type_ids", "token_ids_logprob", "multi_item_delimiter_indices"), NUMBERS),
    "token_indices_to_pool": NUMBERS,
    "top_logprobs_num": ((0, VOCABULARY), (-1, VOCABULARY + 1, "x", None)),
    "input_ids": ((array("q", [0, VOCABULARY - 1]),), (None, array("q"), array("q", [-1]), array("q", [VOCABULARY]))),
    "input_text": (("x", ["x"], None), (1, "\ud800", [1])),
    "input_embeds": ((None, [[0.5]]), ([0.5], "x")),
    "return_hidden_states": ((True, "last"), ("x", 1, None)),
    "sampling_logprobs_mode": (("selected", "support"), ("x", 1, None)),
    "need_wait_for_mm_inputs": ((True, None), (1, "x")),
    "num_items_assigned": ((None,), (1, "x", [1])),
    "encoder_urls": ((None, ["x"]), (1, "x", [1])),
    "kv_hints": ((None,), (1, "x", [1])),
}
GRAMMAR = ("x", None), (1, ["x"])
PENALTY = (-2, 0.5, 2), (-2.1, 2.1, "x")
PARAMETERS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "max_new_tokens": ((0, 1, None), (-1, 1.5, "x")),
    "stop": (("a", ["a", "b"], None), (1, [1], "\ud800")),
    "stop_token_ids": (([0, VOCABULARY - 1], None), ([-1], [VOCABULARY], [1.5], "x")),
    "stop_regex": (("a+", ["a"]), ("(", [1])),
    "temperature": ((0, 0.5, 100), (-1, float("nan"), float("inf"), "x")),
    "top_p": ((0.5, 1), (0, -1, 1.1, "x")),
    "top_k": ((-1, 1, (1 << 31) - 1), (0, 1 << 31, 1.5, "x")),
    "min_p": ((0, 1), (-0.1, 1.1, "x")),
    "frequency_penalty": PENALTY,
    "presence_penalty": PENALTY,
    "repetition_penalty": ((1e-6, 1, 2), (0, 1e-7, -1, 2.1, "x")),
    "min_new_tokens": ((0, 5), (-1, 1.5, "x")),
    "n": ((1, 2, 1024), (0, -1, 1025, 1.5, "x", None)),
    "beam_width": ((1, None), (2, 0, -1, "x")),
    **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag"), GRAMMAR),
    **dict.fromkeys(("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens"), ((True, False), (1, "x"))),
    **dict.fromkeys(("no_stop_trim", "ebnf_full_assistant"), ((True, False), (1, "x"))),
    "stream_interval": ((1, None), (0, -1, "x")),
    "logit_bias": (
        ({"5": -1e9}, {"5": 1e9}, None),
        ({"384": 1.0}, {"-1": 1.0}, {"5": 1.1e9}, {"5": float("nan")}, {"5": float("-inf")}, {"5": "x"}, "x"),
    ),
    "sampling_seed": ((0, -(1 << 63), (1 << 63) - 1, None), (1 << 63, "x", 1.5)),
    "custom_params": (({"a": 1}, None), ("x", 1)),
    "watermark": ((None,), ("x", 1)),
    **dict.fromkeys(SET_BY_SGLANG, ((), (True, 1, "x", None))),
}


def send(*requests: TokenizedGenerateReqInput) -> list[TokenizedGenerateReqInput]:
    """Return the requests as the scheduler gets them, each alone and then all in a batch."""
    sent: list[Any] = []
    for message in (*requests, BatchTokenizedGenerateReqInput(batch=list(requests))):
        check_message(lambda manager, obj: sent.append(obj), MANAGER, message)
    *alone, batch = [msgpack_decode(msgpack_encode(message)) for message in sent]
    return [*alone, *batch.batch]


def sent(**fields: Any) -> list[TokenizedGenerateReqInput]:
    return send(tokenized(**fields))


def normalize(**fields: Any) -> GenerateReqInput:
    request = GenerateReqInput(**{"input_ids": [5], **fields})
    check_fields(SGLANGS_OWN, request)
    return request


def sent_parameter(name: str, value: Any) -> tuple[SamplingParams, list[SamplingParams]]:
    """Send a request with a sampling parameter. Return what SGLang derives from the value, and what arrives."""
    request = normalize(sampling_params={name: value})
    given = request.sampling_params if request.is_single else request.sampling_params[0]
    assert given.keys() == {name} and given[name] is value
    params = SamplingParams(**given)
    params.normalize(TOKENIZER)
    params.verify(VOCABULARY)
    return params, [message.sampling_params for message in send(tokenized(params))]


def assert_one_line(error: ValueError) -> None:
    assert str(error) and "\n" not in str(error)


def test_the_tables_are_complete() -> None:
    assert FIELDS.keys() == {*TokenizedGenerateReqInput.__struct_fields__} - {*OBJECTS}
    assert PARAMETERS.keys() == {*SamplingParams.__struct_fields__}


@pytest.mark.parametrize("name", FIELDS)
def test_fields(name: str) -> None:
    accepted, rejected = FIELDS[name]
    for value in accepted:
        assert [getattr(message, name) for message in sent(**{name: value})] == [value, value]
    for value in rejected:
        with pytest.raises(ValueError, match=f"^({name} is |a field of the request cannot be sent )"):
            sent(**{name: value})


@pytest.mark.parametrize("name", PARAMETERS)
def test_sampling_parameters(name: str) -> None:
    accepted, rejected = PARAMETERS[name]
    for value in accepted:
        params, arrived = sent_parameter(name, value)
        assert arrived == [params, params]
    for value in rejected:
        with pytest.raises(ValueError, match=name) as error:
            sent_parameter(name, value)
        assert_one_line(error.value)


@pytest.mark.parametrize("name", [name for name in TokenizedGenerateReqInput.__struct_fields__ if name not in OBJECTS])
@settings(max_examples=40)
@given(value=VALUES)
def test_any_field_arrives_or_is_rejected(name: str, value: Any) -> None:
    try:
        got = sent(**{name: value})
    except ValueError as error:
        assert_one_line(error)
    else:
        assert [getattr(message, name) for message in got] == [value, value]


@pytest.mark.parametrize("name", SamplingParams.__struct_fields__)
@settings(max_examples=40)
@given(value=VALUES)
def test_any_sampling_parameter_arrives_or_is_rejected(name: str, value: Any) -> None:
    with suppress(ValueError):
        sent_parameter(name, value)


def items(request: GenerateReqInput) -> list[GenerateReqInput]:
    """Return the requests of all answers, as SGLang takes them apart."""
    return [request[i] for i in range(len(request.rid))]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("ids", [[5], [[5], [6]]])
@pytest.mark.parametrize("name", NOT_SERVED)
def test_an_empty_list_is_no_value(name: str, ids: Any, n: int) -> None:
    """/v1/chat/completions sends some of these fields as empty lists."""
    request = normalize(**{"input_ids": ids, name: [], "sampling_params": {"n": n}})
    if not request.is_single:
        assert not any(getattr(item, name) for item in items(request))
    for value in ("x", ["x"], {"a": 1}):
        with pytest.raises(ValueError, match=f"^{name} is .* is not supported: "):
            normalize(**{"input_ids": ids, name: value})


LISTS: dict[str, tuple[Any, Any]] = {
    "rid": ("a", "b"),
    "return_logprob": (True, False),
    "logprob_start_len": (0, -1),
    "top_logprobs_num": (1, 2),
    "token_ids_logprob": ([1], [2]),
    "return_hidden_states": (False, "last"),
    "custom_logit_processor": ("a", "b"),
    "extra_key": ("a", "b"),
    "cache_salt": ("a", "b"),
    "lora_path": ("a", "b"),
    "bootstrap_host": ("a", "b"),
    "bootstrap_port": (1, 2),
    "bootstrap_room": (1, 2),
    "bootstrap_pair_key": ("a", "b"),
    "decode_tp_size": (1, 2),
}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("name", LISTS)
def test_lists_have_an_item_of_each_prompt(name: str, n: int) -> None:
    """Each answer gets the item of its prompt. SGLang does not take some lists with `n` above 1."""
    values = list(LISTS[name])
    with suppress(ValueError) if n > 1 else nullcontext():
        request = normalize(**{"input_ids": [[5], [6]], name: values, "sampling_params": {"n": n}})
        got = items(request)
        assert [getattr(item, name) for item in got] == [values[item.input_ids[0] - 5] for item in got]
    for wrong in (values[:1], [*values, values[0]], [*values, *values, *values]):
        with pytest.raises(ValueError):
            normalize(**{"input_ids": [[5], [6]], name: wrong, "sampling_params": {"n": n}})


def origin(mode: DisaggregationMode = DisaggregationMode.NULL, method: str = "POST", **fields: Any) -> Any:
    """Return what SGLang's function gets."""
    obj, request = GenerateReqInput(**{"input_ids": [5], **fields}), SimpleNamespace(method=method)
    manager = SimpleNamespace(disaggregation_mode=mode)
    got = check_origin(lambda *arguments: arguments, manager, obj, request)
    assert got == (manager, obj, request)


@pytest.mark.parametrize("rid", ["HEALTH_CHECK", "HEALTH_CHECK_1", ["a", "HEALTH_CHECK_b"]])
def test_ids_of_health_checks(rid: Any) -> None:
    origin(rid="a_HEALTH_CHECK")
    origin(rid=rid, method="GET")
    with pytest.raises(ValueError, match=r"^rid is 'HEALTH_CHECK.*; expected an id that does not begin with HEALTH_CH"):
        origin(rid=rid)


BOOTSTRAP = {
    "bootstrap_host": "2.2.2.2",
    "bootstrap_port": 0,
    "bootstrap_room": 0,
    "bootstrap_pair_key": "",
    "decode_tp_size": 1,
    "disagg_prefill_dp_rank": 0,
}


@pytest.mark.parametrize("name", BOOTSTRAP)
def test_fields_of_disaggregated_servers(name: str) -> None:
    origin(**{name: None})
    origin(DisaggregationMode.PREFILL, **{name: BOOTSTRAP[name]})
    origin(DisaggregationMode.DECODE, **{name: BOOTSTRAP[name]})
    with pytest.raises(ValueError, match=f"^{name} is .*; expected nothing: this server has no --disaggregation-mode"):
        origin(**{name: BOOTSTRAP[name]})


def test_the_address_of_sglangs_checks_has_short_prompts() -> None:
    sent(bootstrap_host="2.2.2.2", input_ids=array("q", [5] * 128))
    sent(bootstrap_host="2.2.2.3", input_ids=array("q", [5] * 129))
    with pytest.raises(ValueError, match=r"^bootstrap_host is '2\.2\.2\.2'; expected the address of a prefill server"):
        sent(bootstrap_host="2.2.2.2", input_ids=array("q", [5] * 129))


@pytest.mark.parametrize("ids", [[], [-1], [5, VOCABULARY], [(1 << 63) - 1]])
def test_token_ids_beyond_the_vocabulary(ids: list[int]) -> None:
    send(tokenized(input_ids=array("q", [0, VOCABULARY - 1])))
    with pytest.raises(ValueError, match=r"^input_ids is .*; expected "):
        send(tokenized(), tokenized(input_ids=array("q", ids)))


def test_each_request_of_a_batch_is_checked() -> None:
    batch = BatchTokenizedGenerateReqInput(batch=[tokenized(), tokenized(input_ids=array("q", [VOCABULARY]))])
    with pytest.raises(ValueError, match=f"^input_ids is {VOCABULARY}; "):
        check_message(lambda manager, obj: None, MANAGER, batch)


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
