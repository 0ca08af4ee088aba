"""`POST /dsv4/lookup`: how many tokens of a prompt a request would hit on each rank, and where they are.

The HTTP process sends the prompt to all ranks as an `RpcReqInput`, one of SGLang's messages, which every process of a
server can decode and pass on. Each rank answers with an `RpcReqOutput` between two steps.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import sys
import uuid
from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from fastapi import Request  # noqa: TID251  SGLang's server gets the endpoint; nothing else listens
from sglang.srt.managers.io_struct import RpcReqInput, RpcReqOutput
from sglang.srt.runtime_context import get_parallel

from dsv4_sglang.srt.features.cached_places import find
from dsv4_sglang.srt.features.control_requests import ControlRequestError, receiving
from dsv4_sglang.srt.prefix_cache.cache import PrefixCache
from dsv4_sglang.srt.sglang.scheduler import send_to_schedulers, tokenize, wrap_dispatcher

log = logging.getLogger(__name__)

PATH = "/dsv4/lookup"
# `RpcReqInput.method` of a lookup.
METHOD = "dsv4_lookup"
HTTP_SERVER = "sglang.srt.entrypoints.http_server"


class Lookup(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a request: a prompt as in `/generate`, its name space, and whether to search the storage."""

    text: str | None = None
    input_ids: list[int] | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    files: bool = False


# In an HTTP process


def add_endpoint(original: Callable[..., None], manager: Any, tokenizer_manager: Any, *args: Any, **named: Any) -> None:
    """AROUND `TemplateManager.initialize_templates`: add the endpoint to SGLang's HTTP server, if it runs here."""
    original(manager, tokenizer_manager, *args, **named)
    server = sys.modules.get(HTTP_SERVER)
    if server is None:  # an engine without a server
        return

    async def lookup(request: Request) -> dict[str, Any]:
        return await _look_up(tokenizer_manager, await request.body())

    _, schemas = msgspec.json.schema_components([Lookup])
    content = {"application/json": {"schema": schemas["Lookup"]}}
    server.app.add_api_route(
        PATH, lookup, methods=["POST"], openapi_extra={"requestBody": {"required": True, "content": content}}
    )


async def _look_up(manager: Any, body: bytes) -> dict[str, Any]:
    """Return the answer to a body.

    Raises:
        ControlRequestError: the body is invalid, or a rank cannot answer.
    """
    try:
        given = msgspec.json.decode(body, type=Lookup)
        ids = await _ids_of(manager, given)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise ControlRequestError(f"{PATH}: {error}") from None
    manager.auto_create_handle_loop()
    answers = _Answers(get_parallel().num_dp_ranks)
    request = RpcReqInput(
        rid=uuid.uuid4().hex,
        method=METHOD,
        parameters={
            "ids": base64.b64encode(ids.tobytes()).decode(),
            # SGLang treats an empty name space as none.
            "extra_key": given.extra_key or None,
            "cache_salt": given.cache_salt or None,
            "files": given.files,
        },
    )
    with receiving(str(request.rid), answers):
        send_to_schedulers(manager, request)
        await answers.complete.wait()
    if errors := [answer.message for answer in answers.received if not answer.success]:
        raise ControlRequestError(f"{PATH}: {errors[0]}")
    ranks = sorted((json.loads(answer.message) for answer in answers.received), key=lambda rank: rank["dp_rank"])
    return {"prompt_tokens": len(ids), "ranks": ranks}


async def _ids_of(manager: Any, given: Lookup) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return the tokens of a prompt, int32. Raise ValueError if there are none, too many, or wrong ones."""
    if given.input_ids is not None and given.text is None:
        ids = given.input_ids
    elif given.text is not None and given.input_ids is None:
        ids = await tokenize(manager, given.text)
    else:
        raise ValueError("expected either text or input_ids")
    limit, vocabulary = manager.model_config.context_len, manager.model_config.vocab_size
    if not 0 < len(ids) <= limit:
        raise ValueError(f"the prompt has {len(ids)} tokens; expected 1 to {limit}, the context length")
    if not 0 <= min(ids) <= max(ids) < vocabulary:
        raise ValueError(f"input_ids has a token outside the vocabulary; expected 0 to {vocabulary - 1}")
    return np.asarray(ids, dtype=np.int32)


class _Answers:
    """The answers of all ranks to one request, as the result handler of `control_requests` delivers them."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self.received: list[RpcReqOutput] = []
        self.complete = asyncio.Event()

    def handle_recv(self, answer: RpcReqOutput) -> None:
        self.received.append(answer)
        if len(self.received) == self._ranks:
            self.complete.set()


# In a scheduler


def answer_lookups(scheduler: Any) -> None:
    """Let a scheduler answer lookups."""

    def dispatch_or_answer(dispatch: Callable[[Any], Any], request: Any) -> Any:
        if not (isinstance(request, RpcReqInput) and request.method == METHOD):
            return dispatch(request)
        if get_parallel().attn_tp_rank == 0:  # the other processes of a rank have the same tree
            scheduler.send_control_output(_answer(scheduler.tree_cache, request), request)
        return None

    wrap_dispatcher(scheduler, dispatch_or_answer)


def _answer(cache: Any, request: RpcReqInput) -> RpcReqOutput:
    """Return the answer of this rank. An error is part of it, because the scheduler would end the server."""
    try:
        success, message = True, json.dumps(_find(cache, **request.parameters or {}))
    except ValueError as error:
        success, message = False, str(error)
    except Exception as error:
        log.exception("dsv4_sglang: %s failed", PATH)
        success, message = False, " ".join(repr(error).split())
    return RpcReqOutput(rid=request.rid, success=success, message=message)


def _find(cache: Any, ids: str, extra_key: str | None, cache_salt: str | None, files: bool) -> dict[str, int]:
    if not isinstance(cache, PrefixCache):
        raise ValueError("this server has no prefix cache (--disable-radix-cache, or a decode server)")
    tokens = array("q", np.frombuffer(base64.b64decode(ids), dtype=np.int32).astype(np.int64).tobytes())
    found = find(cache, tokens, extra_key, cache_salt, files)
    return {
        "dp_rank": get_parallel().attn_dp_rank,
        "hit_tokens": sum(found),
        "device_tokens": found.device,
        "host_tokens": found.host,
        "files_tokens": found.files,
    }
