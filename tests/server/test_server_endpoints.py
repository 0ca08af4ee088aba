"""Every HTTP endpoint gets empty and wrong bodies, and control requests that fail get an error answer.

After each endpoint the server must answer /health and a prompt. The endpoints are read from the server, so endpoints of
a new release are included.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.liveness import STUCK_SECONDS
from support.server import FP32, Server, prompt

pytestmark = [pytest.mark.server, pytest.mark.full]

FLAGS = ("--dtype", "float32", "--context-length", "2048", "--max-running-requests", "4", "--max-total-tokens", "4096")
FLAGS += ("--chunked-prefill-size", "256", "--enable-metrics", "--enable-hierarchical-cache", "--hicache-ratio", "1.5")
OPTIONS = {**FP32, "integrity_check": True}
MODEL = {"seed": 0, "ratios": (0, 4), "index_topk": 1536}
NO_BODY = object()
# Endpoints that do what they are asked to, and the request that undoes it.
UNDO: dict[str, tuple[str, Any]] = {
    "/pause_generation": ("/continue_generation", {}),
    "/slow_down": ("/slow_down", {"forward_sleep_time": None}),
    "/start_profile": ("/stop_profile", NO_BODY),
    "/begin_weight_update": ("/end_weight_update", {}),
}
# SGLang breaks off their streams when a request is rejected: by default they ask for more tokens than the context has.
BREAK_OFF = ("/api/generate", "/api/chat")
# Endpoints that wait for the other processes of a group that a filled body names.
WAIT = ("/init_weights_update_group", "/init_weights_send_group_for_remote_instance")
# Status of a filled body of control endpoints. A status of 400 comes with one line of text.
EXPECTED: dict[str, tuple[int, str]] = {
    "/start_expert_distribution_record": (400, "expert_distribution_recorder_mode"),
    "/stop_expert_distribution_record": (400, "expert_distribution_recorder_mode"),
    "/dump_expert_distribution_record": (400, "expert_distribution_recorder_mode"),
    "/release_memory_occupation": (400, "--enable-memory-saver"),
    "/update_weights_from_distributed": (400, "must run between begin_weight_update() and end_weight_update()"),
    "/resume_memory_occupation": (200, ""),
    "/open_session": (200, ""),
    "/begin_weight_update": (200, "Success"),
    "/end_weight_update": (400, "no weight-update session is open"),
}


def ask(server: Server, method: str, path: str, body: Any = NO_BODY) -> tuple[int, str]:
    """Return (status, text) of a request; status 0 if there is no response."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=STUCK_SECONDS)
    try:
        text = None if body is NO_BODY else json.dumps(body)
        connection.request(method, path, text, {"Content-Type": "application/json", "Connection": "close"})
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return 0, repr(error)
    finally:
        connection.close()


def example(page: dict[str, Any], schema: dict[str, Any]) -> Any:
    """Return a value with the types of a schema of `page`: all required fields, each with a meaningless value."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/components/schemas/")
        return example(page, page["components"]["schemas"][name])
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return example(page, choices[0])
    if "enum" in schema or "const" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    match schema.get("type"):
        case "object" if "properties" in schema:
            return {name: example(page, schema["properties"][name]) for name in schema.get("required", ())}
        case "array":
            return [example(page, schema.get("items", {}))]
        case "integer" | "number":
            return max(1, schema.get("minimum", 1))
        case "boolean":
            return False
        case "object":
            return {}
    return "x"


def bodies_of(page: dict[str, Any], path: str, operation: dict[str, Any]) -> Iterator[Any]:
    """Yield no body, an empty one, two wrong ones and one with all required fields."""
    yield from (NO_BODY, {}, [1], {"x": 1})
    schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if schema is not None and path not in WAIT:
        yield example(page, schema)


def path_of(page: dict[str, Any], path: str, operation: dict[str, Any]) -> str:
    """Return the path of a request with all parameters that the endpoint needs."""
    query = []
    for parameter in operation.get("parameters", ()):
        value = example(page, parameter["schema"])
        if parameter["in"] == "path":
            path = path.replace("{" + parameter["name"] + "}", str(value)).replace(":path}", "}")
        elif parameter.get("required"):
            query.append(f"{parameter['name']}={value}")
    return "?".join([path, *filter(None, ["&".join(query)])])


def assert_serves(server: Server, right: Any, what: str) -> None:
    """Assert that the server answers /health and a prompt of two chunks."""
    for status, text in (ask(server, "GET", "/health"), ask(server, "GET", "/ready")):
        assert status == 200, f"after {what}: {status} {text[:500]}"
    assert server.generate(prompt(300), 2).tokens == right, what


@pytest.fixture(scope="module")
def right(server: Server) -> list[int]:
    return server.generate(prompt(300), 2).tokens


@pytest.fixture(scope="module")
def page(server: Server) -> dict[str, Any]:
    return dict(server.get("/openapi.json"))


def test_every_endpoint(server: Server, right: list[int], page: dict[str, Any]) -> None:
    """No endpoint ends or stops the server, whatever its body. Its last body has all required fields."""
    wrong, seen = [], 0
    for path, operations in page["paths"].items():
        for method, operation in operations.items():
            for body in bodies_of(page, path, operation):
                status, text = ask(server, method.upper(), path_of(page, path, operation), body)
                if status == 0 and path not in BREAK_OFF:
                    wrong.append(f"{method} {path} {'' if body is NO_BODY else json.dumps(body)}: {text}")
                seen += 1
                if path in UNDO:
                    ask(server, "POST", *UNDO[path])
            if path in EXPECTED and (status, True) != (EXPECTED[path][0], EXPECTED[path][1] in text):
                wrong.append(f"{method} {path}: {status} {text[:300]}")
            assert_serves(server, right, f"{method} {path}")
    assert not wrong, "\n".join(wrong)
    assert EXPECTED.keys() | UNDO.keys() <= page["paths"].keys() and seen > 300


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (
            "/update_weights_from_distributed",
            {"names": ["x"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "nope"},
            "Group nope not in",
        ),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["eA=="]}, "invalid load key, 'x'"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": []}, "list index out of range"),
        ("/update_weights_from_disk", {"model_path": "/nowhere"}, "nowhere"),
    ],
)
def test_a_weight_update_that_fails(
    server: Server, right: list[int], path: str, body: dict[str, Any], message: str
) -> None:
    """The update gets an error answer, and the server goes on with the old weights."""
    assert ask(server, "POST", "/begin_weight_update", {})[0] == 200
    status, text = ask(server, "POST", path, body)
    assert status == 400 and message in text, (status, text)
    assert ask(server, "POST", "/end_weight_update", {})[0] == 200
    assert_serves(server, right, path)


def test_an_error_has_one_line(server: Server) -> None:
    """The answer has SGLang's format, and the log has one line."""
    status, text = ask(server, "POST", "/release_memory_occupation", {})
    message = json.loads(text)["error"]["message"]
    assert status == 400 and message.startswith("/release_memory_occupation releases nothing") and "\n" not in message
    assert f"ReleaseMemoryOccupationReqInput failed: {message}" in server.log_text()


def test_only_the_named_request_is_aborted(server: Server) -> None:
    """Ids that begin with the id of an aborted request are those of other requests."""
    rids = ["job-10", "job-1/2", "job-1"]
    rests = [server.begin(prompt(10, seed=i), 1500, 1, rid=rid) for i, rid in enumerate(rids)]
    assert ask(server, "POST", "/abort_request", {"rid": "job-1"})[0] == 200
    *others, aborted = [rest() for rest in rests]
    assert [len(answer.tokens) for answer in others] == [1500, 1500] and len(aborted.tokens) < 1500


def test_nothing_is_left(server: Server, tmp_path: Path) -> None:
    server.wait_idle()
    server.flush()
    server.wait_idle()
