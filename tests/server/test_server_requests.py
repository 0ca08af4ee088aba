"""Request fields with values at and beyond their bounds and of wrong types give the right answer or status 400.

The fields are read from SGLang's classes, so fields of a new release are included. After each field the server must
still answer a normal request.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pydantic import BaseModel
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams
from support.lifecycle import SPARED
from support.liveness import STUCK_SECONDS
from support.server import FP32, Server

from dsv4_sglang.srt.plugin.request_validation import SET_BY_SGLANG

pytestmark = [pytest.mark.server, pytest.mark.full]

CONTEXT, VOCABULARY = 2048, 384
FLAGS = ("--dtype", "float32", "--context-length", str(CONTEXT), "--max-running-requests", "16", "--enable-metrics")
FLAGS += ("--max-total-tokens", "8192", "--chunked-prefill-size", "256", "--tool-call-parser", "deepseekv4")
OPTIONS = FP32
MODEL = {"seed": 0, "ratios": (0, 4), "index_topk": 1536}

PROMPT = [5, 6, 7]
GREEDY = {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}
# Values of all JSON types. The vocabulary ends at VOCABULARY - 1.
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1.5, VOCABULARY, 1 << 31, 1 << 70, -(1 << 70), 1e300, float("nan")),
    *("", "x", "(", "\ud800"),
    *([], [1], [-1], [1 << 70], ["x"], [None], [[1]], [{}]),
    *({}, {"a": 1}, {"1": 1e300}, {"1": "x"}, {"-1": 1}, {"id": 5}),
)
OPENAI_VALUES = (-1, 1.5, VOCABULARY + 1, 1 << 40, 1 << 70, "x", "\ud800", [1], ["x"], {"1": "x"})
FIELDS = [field.name for field in dataclasses.fields(GenerateReqInput)]
PARAMETERS = list(SamplingParams.__struct_fields__)
# Fields that may change the answer.
OTHER_ANSWER = {
    *("text", "input_ids", "sampling_params", "stream"),
    *("max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "n", "logit_bias"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("json_schema", "regex", "ebnf", "structural_tag"),
}
# The values of VALUES that a field accepts, as text. All others get status 400.
OF_TEXT, OF_FLAG, OF_IMAGES = ("None", "''", "'x'", "'('"), ("True", "0"), ("None", "[]", "{}")
OF_OBJECT = ("None", "{}", "{'a': 1}", "{'1': 1e+300}", "{'1': 'x'}", "{'-1': 1}", "{'id': 5}")
OF_NUMBER, OF_ANY_NUMBER = ("0", "-1", "384", "2147483648"), ("None", "True", "0", "-1", "384", "2147483648")
ACCEPTED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("rid", "session_id", "routing_key", "conversation_id", "extra_key", "cache_salt"), OF_TEXT),
    **dict.fromkeys(("watermark", "sampling_logprobs_mode", "http_worker_ipc", "max_thinking_tokens"), ("None",)),
    **dict.fromkeys(("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"), ("None",)),
    **dict.fromkeys(("decode_tp_size", "disagg_prefill_dp_rank", "text"), ("None",)),
    **dict.fromkeys(("input_embeds", "modalities", "lora_id"), ("None", "[]")),
    **dict.fromkeys(("multi_item_delimiter_indices", "token_indices_to_pool"), ("None", "[]")),
    **dict.fromkeys(("image_data", "video_data", "audio_data", "positional_embed_overrides"), OF_IMAGES),
    **dict.fromkeys(("mm_hashes", "encoder_urls"), ("None", "[]", "['x']")),
    **dict.fromkeys(("use_audio_in_video", "return_flat_raw_top_logprobs", "log_metrics"), OF_FLAG),
    **dict.fromkeys(("return_flat_raw_output_top_logprobs", "return_routed_experts", "return_bytes"), OF_FLAG),
    **dict.fromkeys(("return_indexer_topk", "background", "no_logs", "return_entropy"), OF_FLAG),
    **dict.fromkeys(("video_config", "external_trace_header", "images_config", "mm_processor_kwargs"), OF_OBJECT),
    **dict.fromkeys(("sampling_params", "session_params", "custom_labels"), ("None", "{}")),
    **dict.fromkeys(("num_items_assigned", "kv_hints"), ("None", "{}")),
    **dict.fromkeys(("return_logprob", "return_sampling_mask"), ("None", "True")),
    **dict.fromkeys(("logprob_start_len", "priority"), ("None", *OF_NUMBER)),
    **dict.fromkeys(("return_text_in_logprobs", "stream", "require_reasoning"), ("True",)),
    **dict.fromkeys(("lora_path", "custom_logit_processor"), ("None", "''")),
    **dict.fromkeys(("routed_dp_rank", "data_parallel_rank"), ("None", "0")),
    **dict.fromkeys(("max_dynamic_patch", "min_dynamic_patch"), OF_ANY_NUMBER),
    **dict.fromkeys(("image_max_dynamic_patch", "video_max_dynamic_patch"), OF_ANY_NUMBER),
    "input_ids": ("[1]", "[[1]]"),
    "mm_content_hashes": ("None", "[]", "['x']", "[None]"),
    "top_logprobs_num": ("None", "0", "384"),
    "token_ids_logprob": ("None", "[]", "[1]"),
    "return_prompt_token_ids": ("True",),
    "return_flat_raw_top_logprobs_b64": ("0",),
    "return_hidden_states": (),
    "routed_experts_start_len": OF_NUMBER,
    "received_time": (*OF_ANY_NUMBER, "1.5", str(1 << 70), str(-(1 << 70)), "1e+300"),
    "need_wait_for_mm_inputs": ("None", *OF_FLAG),
}
# For each sampling parameter: values that must be answered.
GOOD: dict[str, tuple[Any, ...]] = {
    "max_new_tokens": (1, 384),
    "stop": ("x", ["x"]),
    "stop_token_ids": ([1],),
    "stop_regex": ("x",),
    "temperature": (0, 1.5),
    "top_p": (0.5, 1),
    "top_k": (-1, 1, 384),
    "min_p": (0, 0.5),
    "frequency_penalty": (-1, 1.5),
    "presence_penalty": (-1, 1.5),
    "repetition_penalty": (0.5, 1.5),
    "min_new_tokens": (0, 2),
    "n": (1, 2, 3),
    "beam_width": (1, None),
    "json_schema": ('{"type": "integer"}',),
    "regex": ("x",),
    "ebnf": ('root ::= "a"',),
    "structural_tag": (None,),
    **dict.fromkeys(("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens"), (True, False)),
    "no_stop_trim": (True, False),
    "ebnf_full_assistant": (),  # SGLang's HTTP server rejects it
    "stream_interval": (1, 384),
    "logit_bias": ({"1": 1.5},),
    "sampling_seed": (0, -1, 384),
    "custom_params": ({}, {"a": 1}),
    "watermark": (None,),
    **dict.fromkeys(SET_BY_SGLANG, ()),
}
# A prompt of two prefill chunks.
LONG = [5 + i % 300 for i in range(300)]


def usual(**fields: Any) -> dict[str, Any]:
    return {"input_ids": PROMPT, "sampling_params": GREEDY, **fields}


def with_parameter(name: str, value: Any) -> dict[str, Any]:
    """Return a request with a sampling parameter. Near the end of the context, no request takes long."""
    prompt = [5] * (CONTEXT - 20) if name == "max_new_tokens" else PROMPT
    return usual(input_ids=prompt, sampling_params={**GREEDY, name: value})


def ask(server: Server, body: Any, path: str = "/generate") -> tuple[int, str]:
    """Return (status, text) of a request; status 0 if there is no response."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=STUCK_SECONDS)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", "Connection": "close"})
        response = connection.getresponse()
        return response.status, response.read().decode()
    except (OSError, http.client.HTTPException) as error:
        return 0, repr(error)
    finally:
        connection.close()


def ask_all(server: Server, bodies: list[Any], path: str = "/generate") -> list[tuple[int, str]]:
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(lambda body: ask(server, body, path), bodies))


def tokens_of(text: str) -> list[list[int]]:
    """Return the tokens of each answer."""
    answers = json.loads(text)
    return [answer["output_ids"] for answer in (answers if isinstance(answers, list) else [answers])]


@pytest.fixture(scope="module")
def right(server: Server) -> list[int]:
    status, text = ask(server, usual())
    assert status == 200, text
    return tokens_of(text)[0]


def batch_of(body: dict[str, Any]) -> dict[str, Any]:
    """Return the same request for two prompts, sampled and with log probabilities."""
    ids = body["input_ids"]
    body = {"return_logprob": True, "top_logprobs_num": 2, **body, "input_ids": [ids, ids[1:]]}
    return {**body, "sampling_params": {**body["sampling_params"], "temperature": 1}}


def assert_answered_or_rejected(
    server: Server, right: list[int], name: str, body_of: Callable[[Any], dict[str, Any]]
) -> None:
    accepted, wrong = [], []
    expected = ACCEPTED.get(name)
    values = [value for value in VALUES if name != "n" or value != VOCABULARY]  # n = VOCABULARY answers take too long
    for value, (status, text) in zip(values, ask_all(server, [body_of(value) for value in values])):
        shown = f"{name} = {value!r:.40}: {status} {text[:300]}"
        if expected is not None and (status == 200) != (repr(value) in expected):
            wrong.append(f"{shown}; expected {200 if repr(value) in expected else 400}")
        if status == 200:
            accepted.append(value)
            if name not in OTHER_ANSWER and tokens_of(text) != [right]:
                wrong.append(shown)
        elif status != 400 or not text:
            wrong.append(shown)
    if name not in ("input_ids", "text", "sampling_params", "stream"):
        for value, (status, text) in zip(accepted, ask_all(server, [batch_of(body_of(value)) for value in accepted])):
            if status not in (200, 400):
                wrong.append(f"two prompts, {name} = {value!r:.40}: {status} {text[:300]}")
    assert ask(server, usual())[0] == 200, f"{name}: the server ended"
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("field", FIELDS)
def test_fields(server: Server, right: list[int], field: str) -> None:
    assert_answered_or_rejected(server, right, field, lambda value: usual(**{field: value}))


@pytest.mark.parametrize("parameter", PARAMETERS)
def test_sampling_parameters(server: Server, right: list[int], parameter: str) -> None:
    assert_answered_or_rejected(server, right, parameter, lambda value: with_parameter(parameter, value))


def test_the_tables_are_complete() -> None:
    assert ACCEPTED.keys() == {*FIELDS} and GOOD.keys() == {*PARAMETERS}


def assert_all_answered(server: Server, bodies: dict[str, dict[str, Any]], right: dict[str, Any]) -> None:
    """Assert that each body is answered, with the tokens in `right` if there are any for its name."""
    wrong = []
    for name, (status, text) in zip(bodies, ask_all(server, list(bodies.values()))):
        if status != 200 or (name in right and tokens_of(text) != right[name]):
            wrong.append(f"{name}: {status} {text[:300]}, expected {right.get(name, 'any tokens')}")
    assert not wrong, "\n".join(wrong)


def test_two_answers_to_prompts_of_two_chunks(server: Server) -> None:
    """Each value that a field or a parameter accepts is answered. SGLang computes the prompt first, and sends a request
    for each answer then."""
    usual_params = {**GREEDY, "n": 2}
    status, text = ask(server, {"input_ids": LONG, "sampling_params": usual_params})
    assert status == 200 and len(tokens_of(text)) == 2
    answers, bodies, right = tokens_of(text), dict[str, dict[str, Any]](), dict[str, Any]()
    for name in FIELDS:
        # A list has an item of each prompt, and the tests above have the fields that choose the answer.
        for value in VALUES if name not in ("text", "input_ids", "sampling_params", "stream") else ():
            if repr(value) in ACCEPTED[name] and not isinstance(value, list):
                shown = f"{name} = {value!r}"
                bodies[shown] = {"input_ids": LONG, "sampling_params": usual_params, name: value}
                right[shown] = answers
    for name, values in GOOD.items():
        for value in values:
            shown = f"{name} = {value!r}"
            bodies[shown] = {"input_ids": LONG, "sampling_params": {**usual_params, name: value}}
            if name == "n":
                right[shown] = [answers[0]] * value
            elif name not in OTHER_ANSWER:
                right[shown] = answers
    assert_all_answered(server, bodies, right)


def masks_of(text: str) -> list[list[Any]]:
    """Return the sampling masks and log probabilities of each answer."""
    answers = json.loads(text)
    metas = [answer["meta_info"] for answer in (answers if isinstance(answers, list) else [answers])]
    return [[meta.get(f"output_token_sampling_{name}") for name in ("mask", "logprobs")] for meta in metas]


def test_sampling_masks(server: Server) -> None:
    """Each choice has the masks of a single answer. An answer without tokens has none."""
    params = ({}, {"n": 2}, {"max_new_tokens": 0})
    body = usual(return_sampling_mask=True, sampling_logprobs_mode="support")
    asked = ask_all(server, [{**body, "sampling_params": {**GREEDY, **more}} for more in params])
    assert [status for status, _ in asked] == [200, 200, 200], asked
    single, two, none = (masks_of(text) for _, text in asked)
    assert [len(row) for row in single[0]] == [2, 2] and two == single * 2 and none == [[None, None]]


@pytest.mark.parametrize("stream", [False, True])
def test_two_choices(server: Server, stream: bool) -> None:
    _, body = OPENAI["/v1/chat/completions"]
    status, text = ask(server, {**body, "n": 2, "stream": stream, "temperature": 0}, "/v1/chat/completions")
    assert status == 200, text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    pages = [json.loads(line) for line in (lines if stream else [text])]
    assert {choice["index"] for page in pages for choice in page["choices"]} == {0, 1}, text


def test_responses(server: Server) -> None:
    """The endpoint needs the package openai_harmony."""
    model = server.get("/v1/models")["data"][0]["id"]
    status, text = ask(server, {"model": model, "input": "a", "max_output_tokens": 2}, "/v1/responses")
    assert status == 200 and json.loads(text)["usage"]["input_tokens"] == 5, text


def test_one_line_says_why(server: Server) -> None:
    """test_request_validation.py has the other messages."""
    body, message = usual(input_ids=[5, VOCABULARY]), f"input_ids is {VOCABULARY}; expected token ids of the model"
    status, text = ask(server, body)
    assert status == 400 and message in json.loads(text)["error"]["message"]
    _, text = ask(server, {**body, "stream": True})
    event = json.loads(text.splitlines()[0].removeprefix("data: "))
    assert event["error"]["code"] == 400 and message in event["error"]["message"]


BODIES: dict[str, Any] = {
    "as long as the context": usual(input_ids=[5] * CONTEXT),
    "a token too many": usual(input_ids=[5] * (CONTEXT - SPARED + 1)),
    "a million tokens": usual(input_ids=[5] * 1_000_000),
    "two grammars": usual(sampling_params={"regex": "a", "json_schema": "{}"}),
    "a bias of a token that is not there": with_parameter("logit_bias", {"999999": 1.0}),
    "log p of a token that is not there": usual(return_logprob=True, token_ids_logprob=[1 << 20]),
    "no prompt": {"sampling_params": {}},
    "a list": [1, 2],
    "text": "x",
}


@pytest.mark.parametrize("what", BODIES)
def test_bodies_that_are_rejected(server: Server, what: str) -> None:
    status, text = ask(server, BODIES[what])
    assert 400 <= status < 500 and len(text) > 10, (status, text[:500])
    assert ask(server, usual())[0] == 200


def test_the_longest_prompt_is_answered(server: Server) -> None:
    """A prompt of the maximum length is answered; BODIES has one that is a token longer."""
    assert ask(server, usual(input_ids=[5] * (CONTEXT - SPARED)))[0] == 200


def test_a_field_that_sglang_sets(server: Server) -> None:
    """The field is rejected by the HTTP server with its own error format."""
    status, text = ask(server, with_parameter("is_normalized", True))
    assert status == 400 and "is_normalized" in text and "expected one of" in text


OPENAI: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"model": "x", "prompt": "a", "max_tokens": 1}),
    "/v1/chat/completions": (
        ChatCompletionRequest,
        {"model": "x", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    ),
}
# Fields for which SGLang responds with status 500 before it creates a request; the server continues.
SGLANGS_ERROR = {"extra_key", "cache_salt", "response_format"}


@pytest.mark.parametrize("path", OPENAI)
def test_fields_of_openai(server: Server, path: str) -> None:
    kind, body = OPENAI[path]
    wrong = []
    for name in kind.model_fields:
        bodies = [{**body, name: value} for value in OPENAI_VALUES]
        for value, (status, text) in zip(OPENAI_VALUES, ask_all(server, bodies, path)):
            if status not in (200, 400) and not (status == 500 and name in SGLANGS_ERROR):
                wrong.append(f"{name} = {value!r:.40}: {status} {text[:300]}")
        assert ask(server, usual())[0] == 200, f"{name}: the server ended"
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("temperature", [0, 1])
def test_grammars(server: Server, temperature: int) -> None:
    """A request with a grammar is right in a batch with one that has none."""
    params = {"max_new_tokens": 32, "temperature": temperature, "regex": "(ab|cd)e"}
    with_grammar, without = ask_all(server, [usual(sampling_params=params), usual()])
    assert without[0] == with_grammar[0] == 200, with_grammar[1]
    assert re.fullmatch("(ab|cd)e", json.loads(with_grammar[1])["text"]), with_grammar[1]


def test_a_tool_is_called(server: Server) -> None:
    colour = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
    tool = {"type": "function", "function": {"name": "paint", "parameters": colour}}
    body = {"model": "x", "messages": [{"role": "user", "content": "paint"}], "tools": [tool], "max_tokens": 200}
    status, text = ask(server, {**body, "tool_choice": "required", "temperature": 0}, "/v1/chat/completions")
    assert status == 200, text
    call = json.loads(text)["choices"][0]["message"]["tool_calls"][0]  # random weights may call it again
    assert call["function"]["name"] == "paint"
    # The grammar of a tag allows white space after a value.
    arguments = json.loads(call["function"]["arguments"])
    assert {name: value.strip() for name, value in arguments.items()} in ({"colour": "red"}, {"colour": "blue"})


def test_nothing_is_left(server: Server) -> None:
    """No request leaks blocks or slots; SGLang's leak check at idle would end the server."""
    server.wait_idle()
    server.flush()
    server.wait_idle()
