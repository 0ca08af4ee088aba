"""`POST /dsv4/lookup`: how many tokens of a prompt a request would hit on each rank, and where they are.

The HTTP process sends the prompt to all ranks as an `RpcReqInput`, one of SGLang's messages, which every process of a
server can decode and pass on. Each rank answers with an `RpcReqOutput` between two steps.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import uuid
from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from sglang.srt.managers.io_struct import RpcReqInput, RpcReqOutput
from sglang.srt.runtime_context import get_parallel

from dsv4_sglang.srt.features.cached_places import find
from dsv4_sglang.srt.features.control_requests import receiving
from dsv4_sglang.srt.prefix_cache.cache import PrefixCache
from dsv4_sglang.srt.sglang.scheduler import send_to_schedulers, tokenize, wrap_dispatcher

log = logging.getLogger(__name__)

# Tokens, int32.
Ids = np.ndarray[Any, np.dtype[np.int32]]

# `RpcReqInput.method` of a lookup.
METHOD = "dsv4_lookup"


class Prompt(msgspec.Struct, forbid_unknown_fields=True):
    """A prompt as in `/generate`, and its name space."""

    text: str | None = None
    input_ids: list[int] | None = None
    extra_key: str | None = None
    cache_salt: str | None = None


class Lookup(Prompt):
    """Body of a request: a prompt, and whether to search the storage."""

    files: bool = False


# In an HTTP process


async def look_up(manager: Any, given: Lookup, request: Any) -> dict[str, Any]:
    """Return the answer to a body. Raise ValueError if it is invalid, or a rank cannot answer."""
    ids = await ids_of(manager, given)
    return {"prompt_tokens": len(ids), "ranks": await find_on_ranks(manager, ids, given, files=given.files)}


async def find_on_ranks(manager: Any, ids: Ids, space: Prompt, *, files: bool) -> list[dict[str, int]]:
    """Return what each rank has of a prompt, by rank.

    Args:
        manager: tokenizer manager.
        ids: the prompt.
        space: its name space.
        files: search the storage of the host cache, too.

    Raises:
        ValueError: a rank cannot answer.
    """
    manager.auto_create_handle_loop()
    answers = _Answers(get_parallel().num_dp_ranks)
    request = RpcReqInput(
        rid=uuid.uuid4().hex,
        method=METHOD,
        parameters={
            "ids": base64.b64encode(ids.tobytes()).decode(),
            # SGLang treats an empty name space as none.
            "extra_key": space.extra_key or None,
            "cache_salt": space.cache_salt or None,
            "files": files,
        },
    )
    with receiving(str(request.rid), answers):
        send_to_schedulers(manager, request)
        await answers.complete.wait()
    if errors := [answer.message for answer in answers.received if not answer.success]:
        raise ValueError(errors[0])
    return sorted((json.loads(answer.message) for answer in answers.received), key=lambda rank: rank["dp_rank"])


async def ids_of(manager: Any, given: Prompt) -> Ids:
    """Return the tokens of a prompt. Raise ValueError if there are none, too many, or wrong ones."""
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
        log.exception("dsv4_sglang: a lookup failed")
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
