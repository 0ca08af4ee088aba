"""Fault injection that shows that the tests of `test_scheduler_speculation.py` can fail."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.scheduler import Answer, Asked, Child, InProcess
from support.speculation_judge import Judge, apart, cold, prompt
from torch import Tensor

from dsv4_sglang.cache.host_rows import HostSnapshotPool
from dsv4_sglang.cache.state_cache import StateStorage
from dsv4_sglang.srt.attention import backend
from dsv4_sglang.srt.attention.backend import HybridCacheBackend
from dsv4_sglang.srt.attention.snapshot_writer import SnapshotWriter

pytestmark = pytest.mark.full


def not_stored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SnapshotWriter, "commit", lambda snapshots: None)


def stored_before_the_boundary(patch: pytest.MonkeyPatch) -> None:
    """Store the snapshot one round too early, which leaves rejected tokens in it."""
    update, stored = HybridCacheBackend.update_mamba_state_after_mtp_verify, False

    def early(backend: HybridCacheBackend, *, mamba_steps_to_track: Tensor | None, **arguments: Any) -> None:
        nonlocal stored
        if mamba_steps_to_track is not None:
            mamba_steps_to_track = torch.full_like(mamba_steps_to_track, -1 if stored else 0)
            stored = True
        update(backend, mamba_steps_to_track=mamba_steps_to_track, **arguments)

    patch.setattr(HybridCacheBackend, "update_mamba_state_after_mtp_verify", early)


def stored_before_the_draft_model_has_read(patch: pytest.MonkeyPatch) -> None:
    update = HybridCacheBackend.update_mamba_state_after_mtp_verify

    def at_once(backend: HybridCacheBackend, **arguments: Any) -> None:
        update(backend, **arguments)
        backend.snapshots.commit()

    patch.setattr(HybridCacheBackend, "update_mamba_state_after_mtp_verify", at_once)


def without_the_draft_models_ring(patch: pytest.MonkeyPatch) -> None:
    copy = StateStorage._copy

    def copied(storage: Any, *arguments: Any, **named: Any) -> None:
        rings = storage._all_rings
        storage._all_rings = rings[:-1]
        copy(storage, *arguments, **named)
        storage._all_rings = rings

    patch.setattr(StateStorage, "_copy", copied)


def loaded_without_the_draft_models_ring(patch: pytest.MonkeyPatch) -> None:
    load = HostSnapshotPool.load

    def loaded(pool: HostSnapshotPool, snapshot: int, row: int) -> None:
        load(pool, snapshot, row)
        (tables,) = pool._views
        rings = [table for table in tables if table.shape == tables[0].shape]
        rings[-1][snapshot - 1] = 1

    patch.setattr(HostSnapshotPool, "load", loaded)


def nothing_wrong(patch: pytest.MonkeyPatch) -> None:
    pass


def hit(server: InProcess, fault: Callable[[pytest.MonkeyPatch], None], writer: Asked, turn: Asked) -> Answer:
    """Serve `turn` from a snapshot of `writer` that is only on the host, with a fault injected. All snapshots on the
    device are overwritten with 1.0 first."""
    server.flush()
    rings, compressor_states = server.storage._all_rings, server.storage._compressor_state_units
    rings[:, server.storage.num_slots :] = compressor_states[:, -2 * server.storage.snapshots :] = 1.0
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        assert server.serve([writer])[0].verified == writer.count - 1, "a draft was accepted"
        server.evict()
        return server.serve([turn])[0]


WRONG = "not the oracle's"
FAULTS: dict[Callable[[pytest.MonkeyPatch], None], set[str]] = {
    nothing_wrong: set(),
    not_stored: {"ring 0", "ring 3", "CSA compressor state 1"},
    stored_before_the_boundary: {"ring 0"},
    stored_before_the_draft_model_has_read: {"ring 3"},
    without_the_draft_models_ring: {"ring 3"},
    loaded_without_the_draft_models_ring: {"ring 3"},
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_wrong_snapshot_is_detected(
    judge: Judge, server: Child, texts: dict[int, Asked], fault: Callable[..., None]
) -> None:
    """All drafts are wrong, so the second round passes the boundary exactly. Wrong rows of the target model also change
    log p."""
    writer = replace(texts[126], count=6, right=0.0)
    turn = Asked(writer.prompt + writer.follows[:4] + prompt(10), 1)
    warm = server.do(hit, fault, writer, turn)
    assert warm.cached == 128
    found = apart(warm.state, server.do(cold, [warm])[0].state)
    assert FAULTS[fault] <= found.keys() and bool(FAULTS[fault]) == bool(found)
    with pytest.raises(AssertionError, match=WRONG) if "ring 0" in FAULTS[fault] else nullcontext():
        judge.hold(turn, warm)


def seeing_no_drafts(server: InProcess, asked: Asked, right: bool) -> Answer:
    """Use the block ids of the lengths before the step."""
    snapshot = backend.gather_decode

    def short(buffers: Any, *, seq_lens: Tensor, **tables: Any) -> None:
        snapshot(
            buffers, seq_lens=seq_lens - (buffers.tokens_per_request if buffers.tokens_per_request > 1 else 0), **tables
        )

    with pytest.MonkeyPatch.context() as patch:
        if not right:
            patch.setattr(backend, "gather_decode", short)
        return server.serve([asked])[0]


@pytest.mark.parametrize("right", [True, False])
def test_snapshot_without_drafts_is_detected(server: Child, right: bool) -> None:
    """A step that starts a block also closes a compression window in it and reads its entry."""
    asked = Asked(prompt(128), 6, space=f"snapshot {right}")
    answer = server.do(seeing_no_drafts, asked, right)
    assert bool(apart(answer.state, server.do(cold, [answer])[0].state)) != right
