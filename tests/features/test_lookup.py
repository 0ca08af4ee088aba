"""`cached_places.find` returns what a request then hits, and changes nothing in the tree."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import RpcReqInput
from support.host_cache import HostCacheServer
from support.prefix_tree import BLOCK, Request, without_a_server

from dsv4_sglang.srt.features import cached_places, lookup
from dsv4_sglang.srt.features.cached_places import Places, find
from dsv4_sglang.srt.prefix_cache.cache import PrefixCache

PROMPT = [1 + at // BLOCK for at in range(5 * BLOCK + 60)]


class LookedUp(HostCacheServer):
    """Server that looks up every prompt before it is matched, and compares."""

    found: list[Places]

    def _match(self, request: Request) -> Any:
        before = self.tree()
        found = find(self.cache, request.origin_input_ids, request.extra_key, None, False)
        assert self.tree() == before, "a lookup has changed the tree"
        match = super()._match(request)
        device = len(request.prefix_indices)
        assert found == Places(device, match.host_hit_length, 0)
        self.__dict__.setdefault("found", []).append(found)
        return match

    def tree(self) -> list[tuple[Any, ...]]:
        """Return all nodes with their tokens, places, locks and times of use."""
        nodes, stack = [], [self.cache.tree_core.root_node]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            data = [(d.value is None, d.host_value is None, d.lock_ref) for d in node.component_data]
            nodes.append((node.id, len(node.key), node.last_access_time, data))
        registry = self.component.slots.registry
        return [*nodes, (registry.changes,)]


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_a_lookup_finds_what_a_request_hits(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """Conversations, branches and evictions at random, on a device that is smaller than the host."""
    without_a_server(monkeypatch)
    server = LookedUp(monkeypatch, seed=0, policy=policy)
    for _ in range(600):
        server.turn()
    server.settle()
    assert sum(found.device > 0 for found in server.found) > 50
    assert sum(found.host > 0 for found in server.found) > 20
    assert sum(found == Places(0, 0, 0) for found in server.found) > 5


def test_tenants_have_their_own_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_server(monkeypatch)
    server = HostCacheServer(monkeypatch, seed=0)
    server.serve(PROMPT, "tenant")
    ids = array("q", PROMPT)
    assert find(server.cache, ids, "tenant", None, False) == Places(5 * BLOCK, 0, 0)
    for extra_key, salt in ((None, None), ("another", None), (None, "tenant"), ("tenant", "tenant")):
        assert find(server.cache, ids, extra_key, salt, False) == Places(0, 0, 0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    without_a_server(monkeypatch)
    yield tmp_path


def test_files_are_found_as_a_fetch_finds_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that starts on a folder of pages: the whole prompt, its beginning, and the rest after a cached part.

    Snapshots are at four blocks, the interval, and at five. SGLang fetches at least two blocks.
    """
    HostCacheServer(monkeypatch, seed=0, storage="file").serve(PROMPT)
    beginning, short = PROMPT[: 4 * BLOCK + 1], PROMPT[: 3 * BLOCK]
    for ids, cached, stored in ((PROMPT, 0, 5), (beginning, 0, 4), (short, 0, 0), (PROMPT, 3, 2), (PROMPT, 4, 0)):
        with pytest.MonkeyPatch.context() as patch:
            server = HostCacheServer(patch, seed=0, storage="file")
            if cached:
                server.serve(ids[: cached * BLOCK + 1])
            tokens = array("q", ids)
            found = find(server.cache, tokens, None, None, True)
            assert find(server.cache, tokens, None, None, False) == (*found[:2], 0), "files are read only on request"
            assert find(server.cache, tokens, "tenant", None, True) == (0, 0, 0)
            assert server.prefetch(ids) == found.files
            assert server.serve(ids) == sum(found)
            assert (found.device, found.files) == (cached * BLOCK, stored * BLOCK)


def test_files_are_those_of_a_salt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    HostCacheServer(monkeypatch, seed=0, storage="file").serve(PROMPT, salt="a")
    with pytest.MonkeyPatch.context() as patch:
        server = HostCacheServer(patch, seed=0, storage="file")
        files = {salt: find(server.cache, array("q", PROMPT), None, salt, True).files for salt in ("a", "b", None)}
        assert files == {"a": 5 * BLOCK, "b": 0, None: 0}
        assert server.prefetch(PROMPT, salt="a") == files["a"]


def test_the_search_for_files_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    HostCacheServer(monkeypatch, seed=0, storage="file").serve(PROMPT)
    monkeypatch.setattr(cached_places, "STORED_BLOCKS", 4)
    with pytest.MonkeyPatch.context() as patch:
        server = HostCacheServer(patch, seed=0, storage="file")
        asked: list[int] = []
        storage = server.controller.storage_backend
        exists = storage.batch_exists_v2
        patch.setattr(storage, "batch_exists_v2", lambda keys, *rest: asked.append(len(keys)) or exists(keys, *rest))
        assert find(server.cache, array("q", PROMPT), None, None, True).files == 4 * BLOCK
        assert asked == [4]


def test_an_error_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler goes on without a prefix cache, and if a lookup fails."""
    sent: list[Any] = []
    scheduler = SimpleNamespace(
        tree_cache=object(), _request_dispatcher=str, send_control_output=lambda output, request: sent.append(output)
    )
    monkeypatch.setattr(lookup, "get_parallel", lambda: SimpleNamespace(attn_tp_rank=0, attn_dp_rank=0))
    lookup.answer_lookups(scheduler)
    parameters = {"ids": "AQAAAA==", "extra_key": None, "cache_salt": None, "files": False}
    request = RpcReqInput(rid="r", method=lookup.METHOD, parameters=parameters)
    assert scheduler._request_dispatcher(request) is None
    scheduler.tree_cache = PrefixCache.__new__(PrefixCache)
    assert scheduler._request_dispatcher(request) is None
    assert [answer.success for answer in sent] == [False, False] and {answer.rid for answer in sent} == {"r"}
    assert "--disable-radix-cache" in sent[0].message and "AttributeError" in sent[1].message
    other = RpcReqInput(method="save_remote_model", parameters={})
    assert scheduler._request_dispatcher(other) == str(other) and len(sent) == 2
    assert not any("\n" in json.dumps(answer.message) for answer in sent)
