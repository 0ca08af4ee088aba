"""The endpoints that this package adds to SGLang's HTTP server. They have the access rules of `/generate`."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import Request  # noqa: TID251  SGLang's server gets the endpoints; nothing else listens

from dsv4_sglang.srt.features.control_requests import ControlRequestError
from dsv4_sglang.srt.features.lookup import Lookup, look_up
from dsv4_sglang.srt.features.prefetch import Prefetch, prefetch

HTTP_SERVER = "sglang.srt.entrypoints.http_server"
# An answer to a body, from the tokenizer manager and the HTTP request.
Answer = Callable[[Any, Any, Request], Awaitable[dict[str, Any]]]
ENDPOINTS: dict[str, tuple[type[msgspec.Struct], Answer]] = {
    "/dsv4/lookup": (Lookup, look_up),
    "/dsv4/prefetch": (Prefetch, prefetch),
}


def add_endpoints(
    original: Callable[..., None], manager: Any, tokenizer_manager: Any, *args: Any, **named: Any
) -> None:
    """AROUND `TemplateManager.initialize_templates`: add the endpoints to SGLang's HTTP server, if it runs here."""
    original(manager, tokenizer_manager, *args, **named)
    if (server := sys.modules.get(HTTP_SERVER)) is not None:  # else an engine without a server
        for path, (kind, answer) in ENDPOINTS.items():
            _add(server.app, tokenizer_manager, path, kind, answer)


def _add(app: Any, manager: Any, path: str, kind: type[msgspec.Struct], answer: Answer) -> None:
    """Add an endpoint. An invalid body, or a ValueError of `answer`, gets status 400 and a message of one line."""

    async def handle(request: Request) -> dict[str, Any]:
        try:
            return await answer(manager, msgspec.json.decode(await request.body(), type=kind), request)
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            raise ControlRequestError(f"{path}: {error}") from None

    _, schemas = msgspec.json.schema_components([kind])
    content = {"application/json": {"schema": schemas[kind.__name__]}}
    app.add_api_route(
        path,
        handle,
        methods=["POST"],
        # The name of the function, as SGLang's own routes have it.
        name=path.rpartition("/")[2],
        openapi_extra={"requestBody": {"required": True, "content": content}},
    )
