"""Every HTTP endpoint gets empty and wrong bodies, and control requests that fail get an error answer.

After each endpoint the server must answer a prompt, and in the end /health too. The endpoints are read from the server,
so endpoints of a new release are included.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support import server_forkserver
from support.liveness import STUCK_SECONDS
from support.server import ATTEMPTS, FP32, Server, greedy, prompt

from dsv4_sglang.srt.launch.command import Command, cpu_environment

pytestmark = [pytest.mark.server, pytest.mark.full]

FLAGS = ("--dtype", "float32", "--context-length", "2048", "--max-running-requests", "4", "--max-total-tokens", "4096")
FLAGS += ("--chunked-prefill-size", "256", "--enable-metrics", "--enable-hierarchical-cache", "--hicache-ratio", "1.5")
# Seconds in which the group of a weight update must form.
LIMIT = 8
FLAGS += ("--dist-timeout", str(LIMIT))
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
# Endpoints that join the group of a weight update: bodies of groups that nobody else joins.
JOINS: dict[str, dict[str, Any]] = {
    "/init_weights_update_group": {"rank_offset": 1, "world_size": 2, "group_name": "lonely", "backend": "gloo"},
    "/init_weights_send_group_for_remote_instance": {"group_rank": 1, "world_size": 2, "group_name": "alone"},
}
# Routes that /openapi.json does not list, and their methods.
UNLISTED = {
    **dict.fromkeys(("/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"), ("GET", "HEAD", "POST")),
    "/metrics": ("GET", "POST"),  # --enable-metrics
    **dict.fromkeys(("/tokenize", "/detokenize"), ("POST",)),  # other names of listed routes
}
SOCKETS = ("/v1/realtime",)
# Fields without which a request would generate as many tokens as the context has.
SHORT = {"max_tokens": 2}
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
        connection.request(method, path, text, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return 0, repr(error)
    finally:
        connection.close()


def example(page: dict[str, Any], schema: dict[str, Any]) -> Any:
    """Return a value with the types of a schema of `page`: SHORT, and all required fields with meaningless values."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/components/schemas/")
        return example(page, page["components"]["schemas"][name])
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return example(page, choices[0])
    if "enum" in schema or "const" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    match schema.get("type"):
        case "object" if "properties" in schema:
            required = {name: example(page, schema["properties"][name]) for name in schema.get("required", ())}
            return required | {name: value for name, value in SHORT.items() if name in schema["properties"]}
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
    if schema is not None and path not in JOINS:
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


def ask_with_all(
    server: Server, page: dict[str, Any], path: str, method: str, operation: dict[str, Any]
) -> list[tuple[Any, int, str]]:
    """Return (body, status, text) for each body. Bodies of a GET are sent at once, because /health takes a second."""
    bodies, target = [*bodies_of(page, path, operation)], path_of(page, path, operation)

    def asked(body: Any) -> tuple[Any, int, str]:
        answer = ask(server, method.upper(), target, body)
        if path in UNDO:
            ask(server, "POST", *UNDO[path])
        return (body, *answer)

    with ThreadPoolExecutor(len(bodies) if method == "get" and path not in UNDO else 1) as pool:
        return [*pool.map(asked, bodies)]


def assert_answers(server: Server, right: list[int], what: str, **fields: Any) -> None:
    """Assert that the server answers a prompt, and that it is ready."""
    status, text = ask(server, "POST", "/generate", greedy(prompt(300), 2, **fields))
    assert status == 200 and json.loads(text)["output_ids"] == right, f"after {what}: {status} {text[:500]}"
    assert (status := ask(server, "GET", "/ready")[0]) == 200, f"after {what}: /ready {status}"


def assert_serves(server: Server, right: list[int], what: str) -> None:
    """Assert that the server answers a prompt of two chunks, and /health, which takes a second."""
    assert_answers(server, right, what, extra_key=what)
    status, text = ask(server, "GET", "/health")
    assert status == 200, f"after {what}: /health {status} {text[:500]}"


@pytest.fixture(scope="module")
def right(server: Server) -> list[int]:
    return server.generate(prompt(300), 2).tokens


@pytest.fixture(scope="module")
def page(server: Server) -> dict[str, Any]:
    return dict(server.get("/openapi.json"))


def test_all_routes_are_known(page: dict[str, Any], tmp_path: Path) -> None:
    """/openapi.json, UNLISTED and SOCKETS are all routes of SGLang's HTTP server and those that this package adds."""
    file = tmp_path / "routes"
    server_forkserver.run(
        Command([sys.executable, "-m", "support.server_routes", str(file)], cpu_environment()), tmp_path / "log"
    )
    routes = dict(line.replace(":path}", "}").split() for line in file.read_text().splitlines())
    assert {path for path, kind in routes.items() if "WebSocket" in kind} == {*SOCKETS}
    assert {*routes, "/metrics", "/dsv4/lookup", "/dsv4/prefetch"} == page["paths"].keys() | UNLISTED.keys() | {
        *SOCKETS
    }


def test_every_endpoint(server: Server, right: list[int], page: dict[str, Any]) -> None:
    """No endpoint ends or stops the server, whatever its body. Its last body has all required fields."""
    wrong, seen = [], 0
    for path, operations in page["paths"].items():
        for method, operation in operations.items():
            for body, status, text in ask_with_all(server, page, path, method, operation):
                if status == 0 and path not in BREAK_OFF:
                    wrong.append(f"{method} {path} {'' if body is NO_BODY else json.dumps(body)}: {text}")
                seen += 1
            if path in EXPECTED and (status, True) != (EXPECTED[path][0], EXPECTED[path][1] in text):
                wrong.append(f"{method} {path}: {status} {text[:300]}")
            assert_answers(server, right, f"{method} {path}")
    assert_serves(server, right, "all endpoints")
    assert not wrong, "\n".join(wrong)
    assert EXPECTED.keys() | UNDO.keys() | JOINS.keys() <= page["paths"].keys() and seen > 300


def test_every_route_that_is_not_listed(server: Server, right: list[int]) -> None:
    for path, methods in UNLISTED.items():
        for method in methods:
            for body in (NO_BODY, {}, [1], {"x": 1}):
                status, text = ask(server, method, path, body)
                assert status in (200, 400, 404, 405), (method, path, status, text)
            assert_answers(server, right, f"{method} {path}")
    assert_serves(server, right, f"one of {[*UNLISTED]}")


@pytest.mark.parametrize("path", SOCKETS)
def test_every_websocket(server: Server, right: list[int], path: str) -> None:
    """The connection gets an error and is closed, because the model transcribes nothing."""
    client = pytest.importorskip("websockets.sync.client")
    for message in ("", "{}", '{"type": "x"}', "[1]", b"\0"):
        with client.connect(f"ws://127.0.0.1:{server.port}{path}", close_timeout=STUCK_SECONDS) as connection:
            with suppress(Exception):  # closed before the message
                connection.send(message)
            answers = [*connection]
        assert connection.close_code == 1000 and '"error"' in answers[0], (message, answers)
        assert_answers(server, right, f"{message!r} to {path}")


def test_a_group_that_does_not_form(server: Server, right: list[int]) -> None:
    """The server answers requests while it waits for the other processes of a group, and the call gets an error."""
    nobody = server.port + 20
    address = {"master_address": "127.0.0.1", "master_port": nobody, "ports": str(nobody)}
    waited = False
    for attempt in range(1, ATTEMPTS + 1):
        with ThreadPoolExecutor(len(JOINS)) as pool:
            answers = [pool.submit(ask, server, "POST", path, body | address) for path, body in JOINS.items()]
            while server.log_text().count(f"master_port={nobody}") < attempt * len(JOINS):
                time.sleep(0.05)
            assert_serves(server, right, "the calls")
            waited = not any(answer.done() for answer in answers)
            for status, text in (answer.result() for answer in answers):
                assert status == 400 and f"at 127.0.0.1:{nobody} did not form in {LIMIT} s" in text, (status, text)
        if waited:  # a busy machine may answer only after the time limit
            break
    assert waited, "no request was answered while the server waited"
    assert_answers(server, right, "the errors", extra_key="the errors")


@pytest.fixture
def trainer(server: Server, model: Path, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Start a process that sends "norm.weight" (weight_sender.py). Yield the request that joins its group."""
    joining = {"master_address": "127.0.0.1", "master_port": server.port + 21, "rank_offset": 1, "world_size": 2}
    joining |= {"group_name": "trainer", "backend": "gloo"}
    arguments = [str(model), "norm.weight", str(joining["master_port"]), joining["group_name"]]
    command = Command([sys.executable, "-m", "support.weight_sender", *arguments], cpu_environment())
    process = server_forkserver.start(command, tmp_path / "log")
    yield joining
    process.kill()


def test_a_group_that_forms(server: Server, right: list[int], trainer: dict[str, Any]) -> None:
    """Weights arrive through the group, and a group that was destroyed is unknown."""
    group = {"group_name": trainer["group_name"]}
    weight = {"names": ["norm.weight"], "dtypes": ["float32"], "shapes": [[256]], **group}
    update = {"begin_weight_update": {}, "update_weights_from_distributed": weight, "end_weight_update": {}}
    answers = []
    for step in ({"init_weights_update_group": trainer, **update}, update):
        for path, body in step.items():
            status, text = ask(server, "POST", f"/{path}", body)
            assert status == 200, (path, text)
        answers.append(json.loads(ask(server, "POST", "/generate", greedy(prompt(300), 2))[1])["output_ids"])
    assert answers[0] != right and answers[1] == right
    assert [ask(server, "POST", "/destroy_weights_update_group", group)[0] for _ in range(2)] == [200, 400]
    assert_answers(server, right, "the update", extra_key="the update")


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
    assert_answers(server, right, path, extra_key=message)


def test_an_error_has_one_line(server: Server) -> None:
    """The answer has SGLang's format, and the log has one line."""
    status, text = ask(server, "POST", "/release_memory_occupation", {})
    message = json.loads(text)["error"]["message"]
    assert status == 400 and message.startswith("/release_memory_occupation releases nothing") and "\n" not in message
    assert f"ReleaseMemoryOccupationReqInput failed: {message}" in server.log_text()


def test_only_the_named_request_is_aborted(server: Server) -> None:
    """Ids that begin with the id of an aborted request are those of other requests."""
    rids = ["job-10", "job-1/2", "job-1"]
    rests = [server.begin(prompt(10, seed=i), 150, 1, rid=rid) for i, rid in enumerate(rids)]
    assert ask(server, "POST", "/abort_request", {"rid": "job-1"})[0] == 200
    *others, aborted = [rest() for rest in rests]
    assert [len(answer.tokens) for answer in others] == [150, 150] and len(aborted.tokens) < 150


def test_nothing_is_left(server: Server, tmp_path: Path) -> None:
    server.wait_idle()
    server.flush()
    server.wait_idle()
