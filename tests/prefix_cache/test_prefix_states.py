"""Tests of snapshots in the state pool: the copied bytes, and that a layer resumed from a snapshot continues as if it
had not been interrupted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.layer import make_step

from dsv4_sglang.cache import CacheLayout, StateStorage
from dsv4_sglang.cache.append import LayerTables, LayerWeights, Projections, append_layer
from dsv4_sglang.model.config import DSV4Config
from dsv4_sglang.model.layer_schedule import AttentionType
from dsv4_sglang.srt.launch.options import Options
from dsv4_sglang.srt.memory.pools import StateParams, StateSlotPool
from dsv4_sglang.srt.memory.served_layout import served_layout
from dsv4_sglang.srt.prefix_cache import copy_timer
from dsv4_sglang.srt.prefix_cache.copy_timer import CopyTimer


def make_pool(dtype: torch.dtype = torch.float8_e4m3fn, draft_tokens: int = 0) -> StateSlotPool:
    layout = served_layout(DSV4Config.flash(), dtype, Options(), "cpu", draft_tokens=draft_tokens)
    layout = CacheLayout(layout.schemas[:5], layout.device)
    params = StateParams.of(layout, staging=2, snapshots=3)
    return StateSlotPool(size=3, cache_params=params, mamba_layer_ids=list(range(5)), device="cpu")


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def fill(state: StateStorage, slot: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    state.rings[:, slot] = torch.randint(0, 255, state.rings[:, slot].shape, generator=generator).to(state.rings.dtype)
    for compressor_state in state.compressor_states.values():
        compressor_state[:, slot] = torch.randn(compressor_state[:, slot].shape, generator=generator)


@pytest.mark.parametrize(
    ("dtype", "draft_tokens", "ring_rows", "compressor_state_rows", "kept"),
    [
        (torch.float8_e4m3fn, 0, 128, 24, (12, 20)),
        (torch.bfloat16, 0, 128, 24, (12, 20)),
        (torch.float8_e4m3fn, 4, 132, 48, (28, 44)),
        (torch.bfloat16, 9, 138, 64, (44, 60)),
    ],
)
def test_state_survives_a_snapshot(
    dtype: torch.dtype, draft_tokens: int, ring_rows: int, compressor_state_rows: int, kept: tuple[int, int]
) -> None:
    """`kept` holds the first of the four rows of the previous stream's k and of its z, for positions 124 .. 127 mod
    128."""
    state = make_pool(dtype, draft_tokens).storage
    csa = state.compressor_states[AttentionType.CSA]
    assert (state.rings.shape[2], csa.shape[2]) == (ring_rows, compressor_state_rows)
    for slot in range(1, state.num_slots):
        fill(state, slot, slot)
    live = (state.rings, *state.compressor_states.values())
    before = [tensor.clone() for tensor in live]
    # Slots 2 and 3 and staging slot 4 are stored. -1 and snapshot 0 are skipped.
    state.store(ids(2, 4, -1, 3, 3), ids(3, 1, 2, 0, 2))
    assert all(map(torch.equal, live, before)), "storing changed a live slot"
    is_kept = torch.zeros(compressor_state_rows, dtype=torch.bool)
    for first in kept:
        is_kept[first : first + 4] = True
    rings, rows = before[0], before[1 + list(state.compressor_states).index(AttentionType.CSA)]
    for slot in (1, 2, 3):
        fill(state, slot, 77)
    untouched = csa[:, 1].clone()
    state.load(ids(3, 2, 1), ids(1, 2, 3))
    for to, source in ((1, 2), (2, 3), (3, 4)):
        assert torch.equal(state.rings[:, to], rings[:, source])
        assert torch.equal(csa[:, to, is_kept], rows[:, source, is_kept]), "the last rows of the previous window"
    assert torch.equal(csa[:, 1, ~is_kept], untouched[:, ~is_kept])


def test_copies_are_timed_without_waiting(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """In seconds. On a CPU the clock is read before and after a copy, on a GPU the device measures."""
    timer, seen = CopyTimer(device), list[float]()
    clock = iter([1.0, 1.5, 2.0, 5.0, 7.0, 7.25])
    if device.type == "cpu":
        monkeypatch.setattr(copy_timer, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    timer.finished = seen.append
    source = torch.ones(1 << 24, device=device)
    for _ in range(3):
        with timer.measure():
            source.clone()
    if device.type == "cuda":
        torch.cuda.synchronize()
    for _ in range(2):
        timer.poll()
        assert len(seen) == 3 and 1e-6 < sum(seen) < 10, "each copy counts once"
        assert device.type == "cuda" or seen == [0.5, 3.0, 0.25]


class LateEvent:
    """Event of a fake device that runs `BEHIND` records behind the host. `made` counts the events."""

    BEHIND = 6
    made = recorded = 0

    def __init__(self) -> None:
        type(self).made += 1

    def record(self) -> None:
        type(self).recorded += 1
        self.at = self.recorded

    def query(self) -> bool:
        return self.at + self.BEHIND <= self.recorded

    def elapsed_time(self, end: LateEvent) -> float:
        """Return milliseconds, as CUDA does: two seconds for one record."""
        assert self.query() and end.query(), "this would raise, and waiting must not be the answer"
        return 2000.0 * (end.at - self.at)


def test_unread_timer_events_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of events is bounded in processes that never read the timer. Only the first tensor-parallel process
    publishes its counters."""
    monkeypatch.setattr(copy_timer, "_event", LateEvent)
    monkeypatch.setattr(LateEvent, "made", 0)
    monkeypatch.setattr(LateEvent, "recorded", 0)
    timer, seen = CopyTimer("cuda"), list[float]()
    timer.finished = seen.append
    for _ in range(1000):
        with timer.measure():
            pass
    assert LateEvent.made <= LateEvent.BEHIND + 4
    timer.poll()
    assert seen == [2.0] * (1000 - LateEvent.BEHIND // 2), "each block that is over counts once, in seconds"


def test_reported_bytes_equal_allocated_bytes() -> None:
    pool = make_pool()
    layout, tensors = pool.storage.layout, pool.storage.tensors
    allocated = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    counted = [*layout.state_parts(pool.storage.num_slots), *layout.snapshot_parts(pool.storage.snapshots)]
    assert pool.bytes == sum(allocated.values()) == sum(part.bytes for part in counted)


# Compare a layer that resumes from a snapshot with the same layer uninterrupted.

# TOKENS is the length of the uninterrupted request, RESUME is the position at which the other request resumes, and
# WRITTEN is the length of the request that left the snapshot.
TOKENS, RESUME, WRITTEN = 400, 256, 300


class ResumedLayer:
    """One layer of each kind over the pools, in fp32. `fault` names the fault injected between two requests."""

    def __init__(self, ratio: int) -> None:
        config = DSV4Config.flash()
        options = Options(entry_format="fp32", indexer_format="fp32")
        layout = served_layout(config, torch.bfloat16, options, "cpu")
        layout = CacheLayout(layout.schemas[:4], layout.device)
        params = StateParams.of(layout, staging=1, snapshots=1)
        self.pool = StateSlotPool(size=3, cache_params=params, mamba_layer_ids=list(range(4)), device="cpu")
        self.state = self.pool.storage
        self.ratio, self.layer = ratio, {0: 0, 4: 2, 128: 3}[ratio]
        generator = torch.Generator().manual_seed(ratio)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        self.schema, csa = layout.schemas[self.layer], ratio == 4
        self.inputs = Projections(
            random(TOKENS, 512),
            random(TOKENS, 2048 if csa else 1024) if ratio else None,
            random(TOKENS, 512) if csa else None,
        )
        self.weights = LayerWeights(
            random(512),
            torch.view_as_real(torch.polar(torch.ones(512, 32), random(512, 32))).flatten(1),
            entry_norm=random(512) if ratio else None,
            ape=random(*((4, 1024) if csa else (128, 512))) if ratio else None,
            index_norm=random(128) if csa else None,
            index_ape=random(4, 256) if csa else None,
        )

    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        entries = torch.zeros(4, 32, 512) if self.ratio == 4 else torch.zeros(1, 4, 512)
        return entries, torch.zeros(4, 32, 128)

    def step(self, slot: int, begin: int, end: int, tables: tuple[torch.Tensor, torch.Tensor], track: int = -1) -> None:
        """Run tokens [begin, end) of the request in `slot`. `track` is the staging slot of its snapshot at RESUME."""
        step = make_step([(slot, begin, end - begin)], {slot: [0, 1, 2, 3]})
        if track >= 0:
            tracked = (step.positions >= RESUME - 128) & (step.positions < RESUME)
            step.staging_slots = torch.where(tracked, track, -1).int()
        buffers = LayerTables(self.state.ring(self.layer), self.state.compressor_state(self.layer), *tables)
        inputs = Projections(*(None if x is None else x[begin:end] for x in self.inputs))
        append_layer(self.schema, buffers, self.weights, inputs, step, torch.zeros(1, step.window_size, 512))

    def resumed(self, fault: str = "") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the entries, index keys and ring of a request of TOKENS tokens that resumes at RESUME."""
        tables = self.tables()
        self.restore(tables, fault)
        # The blocks that the first request wrote after the snapshot are not shared.
        if self.ratio == 4:
            tables[0][2:], tables[1][2:] = 0, 0
        elif self.ratio:
            tables[0][:, 2:] = 0
        if fault == "a snapshot shared without a copy":
            self.step(3, RESUME, RESUME + 50, self.tables())
        self.step(3, RESUME, TOKENS, tables)
        return (*tables, self.state.ring(self.layer)[3].clone())

    def restore(self, tables: tuple[torch.Tensor, torch.Tensor], fault: str) -> None:
        """Run the request that leaves a snapshot at RESUME, and load the snapshot to slot 3."""
        fill(self.state, 3, 5)
        self.step(1, 0, WRITTEN, tables, track=self.pool.size + 1)
        self.state.store(ids(1 if fault == "the state at the end" else self.pool.size + 1), ids(1))
        units = self.state._compressor_state_units
        assert units is not None
        kept = units[:, self.state.num_slots * self.state._units_per_slot :]
        if fault == "previous rows dropped":
            kept[..., :512] = 0
        elif fault == "indexer compressor state dropped":
            kept[..., 512:] = 0
        if fault != "a slot not loaded":
            self.state.load(ids(1), ids(3))

    def uninterrupted(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tables = self.tables()
        self.step(2, 0, TOKENS, tables)
        return (*tables, self.state.ring(self.layer)[2].clone())


def differing_rows(got: torch.Tensor, want: torch.Tensor) -> list[int]:
    return torch.nonzero((got - want).abs().flatten(0, -2).amax(-1) > 1e-5).flatten().tolist()


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_resumed_layer_equals_an_uninterrupted_one(ratio: int) -> None:
    layer = ResumedLayer(ratio)
    for got, want in zip(layer.resumed(), layer.uninterrupted()):
        assert differing_rows(got, want) == []


@pytest.mark.parametrize(
    ("fault", "entries", "keys"),
    [
        # Entry 256 / 4 pools the four rows before it, and stays wrong.
        ("previous rows dropped", [64], []),
        ("indexer compressor state dropped", [], [64]),
        ("a slot not loaded", [64], [64]),
        ("the state at the end", [64], [64]),
        ("a snapshot shared without a copy", [64], [64]),
    ],
)
def test_damaged_snapshot_is_detected(fault: str, entries: list[int], keys: list[int]) -> None:
    layer = ResumedLayer(4)
    got, want = layer.resumed(fault), layer.uninterrupted()
    assert differing_rows(got[0], want[0]) == entries
    assert differing_rows(got[1], want[1]) == keys


@pytest.mark.parametrize("fault", ["a slot not loaded", "the state at the end"])
def test_resumed_window_comes_from_the_snapshot(fault: str) -> None:
    """The ring of a request that ran 20 tokens after the snapshot still holds 108 older rows."""
    layer = ResumedLayer(0)
    tables = layer.tables()
    layer.restore(tables, fault)
    layer.step(3, RESUME, RESUME + 20, tables)
    layer.step(2, 0, RESUME + 20, tables)
    rows = differing_rows(layer.state.ring(0)[3], layer.state.ring(0)[2])
    assert rows and set(rows) <= set(range(20, 128))
