"""Fields of a request with values at and beyond their bounds and of wrong types: a right answer, or status 400.

The fields are those of SGLang's classes, so one of a new release is tried, too. Between the requests the server answers
a usual one as before.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from progress import STUCK_SECONDS
from server_harness import Server, running
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

pytestmark = pytest.mark.server

CONTEXT, VOCABULARY = 512, 384
FLAGS = ("--dtype", "float32", "--context-length", str(CONTEXT), "--max-running-requests", "16", "--enable-metrics")
FLAGS += ("--max-total-tokens", "8192", "--chunked-prefill-size", "256")
OPTIONS = {"entry_format": "fp32", "indexer_format": "fp32"}
MODEL = {"ratios": (0, 4), "index_topk": 1536}

PROMPT = [5, 6, 7]
GREEDY = {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, -5, 1.5, -0.5, VOCABULARY - 1, VOCABULARY, VOCABULARY + 1),
    *(1 << 31, 1 << 40, (1 << 63) - 1, 1 << 63, 1 << 70, -(1 << 40), -(1 << 70), 1e-300, 1e300, float("nan")),
    *("", "x", "(", "\ud800", "x" * 5000),
    *([], [1], [-1], [VOCABULARY], [1 << 70], [1.5], ["x"], [None], [[1]], [[]], [{}]),
    *({}, {"a": 1}, {"1": 1.0}, {"1": 1e300}, {"1": "x"}, {"-1": 1}, {"id": 5}, {"a": {"b": [1]}}),
)
"""Of all JSON types. Tokens that the model has end at VOCABULARY - 1."""
FIELDS = [field.name for field in dataclasses.fields(GenerateReqInput)]
PARAMETERS = list(SamplingParams.__struct_fields__)
OTHER_ANSWER = {
    *("text", "input_ids", "sampling_params", "stream"),
    *("max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "n", "logit_bias"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("json_schema", "regex", "ebnf", "structural_tag"),
}
"""Fields that may change the answer."""


@pytest.fixture(scope="module")
def server(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("requests") / "log"
    with running(tiny(seed=0, **MODEL), log, *FLAGS, **OPTIONS) as server:
        yield server


def usual(**fields: Any) -> dict[str, Any]:
    return {"input_ids": PROMPT, "sampling_params": GREEDY, **fields}


def with_parameter(name: str, value: Any) -> dict[str, Any]:
    return usual(sampling_params={**GREEDY, name: value})


def ask(server: Server, body: Any, path: str = "/generate") -> tuple[int, str]:
    """(status, text); 0 if there is no answer."""
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
    """Of each answer."""
    answers = json.loads(text)
    return [answer["output_ids"] for answer in (answers if isinstance(answers, list) else [answers])]


@pytest.fixture(scope="module")
def right(server: Server) -> list[int]:
    status, text = ask(server, usual())
    assert status == 200, text
    return tokens_of(text)[0]


def batch_of(body: dict[str, Any]) -> dict[str, Any]:
    """The same for two prompts, sampled, with log probabilities."""
    body = {"return_logprob": True, "top_logprobs_num": 2, **body, "input_ids": [PROMPT, [8, 9]]}
    return {**body, "sampling_params": {**body["sampling_params"], "temperature": 1}}


def assert_answered_or_rejected(
    server: Server, right: list[int], name: str, body_of: Callable[[Any], dict[str, Any]]
) -> None:
    accepted, wrong = [], []
    for value, (status, text) in zip(VALUES, ask_all(server, [body_of(value) for value in VALUES])):
        shown = f"{name} = {value!r:.40}: {status} {text[:300]}"
        if status == 200:
            accepted.append(value)
            if name not in OTHER_ANSWER and tokens_of(text) != [right]:
                wrong.append(shown)
        elif status != 400 or len(text) < 10:
            wrong.append(shown)
    if name not in ("input_ids", "text", "sampling_params", "stream"):
        for value, (status, text) in zip(accepted, ask_all(server, [batch_of(body_of(value)) for value in accepted])):
            if status not in (200, 400):
                wrong.append(f"two prompts, {name} = {value!r:.40}: {status} {text[:300]}")
    assert ask(server, usual())[0] == 200, f"{name}: the server ended"
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", FIELDS)
def test_fields(server: Server, right: list[int], name: str) -> None:
    assert_answered_or_rejected(server, right, name, lambda value: usual(**{name: value}))


@pytest.mark.parametrize("name", PARAMETERS)
def test_sampling_parameters(server: Server, right: list[int], name: str) -> None:
    assert_answered_or_rejected(server, right, name, lambda value: with_parameter(name, value))
