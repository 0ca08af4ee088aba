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
from liveness import STUCK_SECONDS
from pydantic import BaseModel
from server_harness import FP32, Server
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from benchmarks.lifecycle import SPARED

pytestmark = pytest.mark.server

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


def usual(**fields: Any) -> dict[str, Any]:
    return {"input_ids": PROMPT, "sampling_params": GREEDY, **fields}


def with_parameter(name: str, value: Any) -> dict[str, Any]:
    return usual(sampling_params={**GREEDY, name: value})


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
    body = {"return_logprob": True, "top_logprobs_num": 2, **body, "input_ids": [PROMPT, [8, 9]]}
    return {**body, "sampling_params": {**body["sampling_params"], "temperature": 1}}


def assert_answered_or_rejected(
    server: Server, right: list[int], name: str, body_of: Callable[[Any], dict[str, Any]]
) -> None:
    accepted, wrong = [], []
    values = [value for value in VALUES if name != "n" or value != VOCABULARY]  # n = VOCABULARY answers take too long
    for value, (status, text) in zip(values, ask_all(server, [body_of(value) for value in values])):
        shown = f"{name} = {value!r:.40}: {status} {text[:300]}"
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
    (call,) = json.loads(text)["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "paint"
    # The grammar of a tag allows white space after a value.
    arguments = json.loads(call["function"]["arguments"])
    assert {name: value.strip() for name, value in arguments.items()} in ({"colour": "red"}, {"colour": "blue"})


def test_nothing_is_left(server: Server) -> None:
    """No request leaks blocks or slots; SGLang's leak check at idle would end the server."""
    server.wait_idle()
    server.flush()
    server.wait_idle()
