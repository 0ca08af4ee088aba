"""Tests of a whole DeepSeek-V4.1 cache (SPEC 11): requests run in chunks and single tokens through all layers of a
small model, compared with a dense computation.

The dense computation has one vector per request, layer and position, computed at once by DeepSeek's formulas
(`v41_formulas`). It derives scores, both levels of the selection and the softmax from them, token by token, in float64,
without rings, blocks, slots or chunks. Inputs and rotation are chosen so that rounding and selection do not depend on
the summation order: a pair's scores are equal or far apart, the indexer's matrix picks channels, and head weights are
multiples of 1/2.
"""

import functools
from dataclasses import replace

import pytest
import torch
from reference.v41_formulas import EPS, act_quant, angles, fp4_act_quant, normalised, same
from support.candidate_cases import candidate_case
from torch import Tensor

from dsv4_sglang.attention.registry import make_kernels
from dsv4_sglang.cache import CacheLayout, LayerWeights, StateStorage
from dsv4_sglang.cache import step as step_module
from dsv4_sglang.cache.append import LayerTables, Projections
from dsv4_sglang.cache.device import resolve_device
from dsv4_sglang.cache.layer_spec import LayerKVSpec, Selection, entry_limits, source_of
from dsv4_sglang.cache.paged_cache import make_paged_pools
from dsv4_sglang.cache.specs_v41 import v41_specs
from dsv4_sglang.cache.step import StepMetadata
from dsv4_sglang.formats import KVFormat
from dsv4_sglang.formats.quantise import mxfp4_values
from dsv4_sglang.model.rope import rope_frequencies
from dsv4_sglang.model.v41 import V41Config
from dsv4_sglang.ops.cuda_index import listed_blocks
from dsv4_sglang.ops.reference import chunks, read
from dsv4_sglang.ops.rope import rope_table
from dsv4_sglang.srt.attention import layer_ops
from dsv4_sglang.srt.attention.layer_ops import IndexQuery, LayerInputs, LayerOps
from dsv4_sglang.srt.attention.step_scratch import StepScratch

CPU = torch.device("cpu")
BOUND = 1e-5
# On a GPU, the last bit of a norm or an angle may decide how a value of a row is rounded, and thus which entry is
# selected.
GPU_BOUND, GPU_MAX_APART = 1e-2, 0.02

LENGTH, HEADS, INDEX_HEADS, TOP = 330, 2, 32, 12
SCALE = 512**-0.5

CONFIG = V41Config(
    **{
        **vars(V41Config.flash()),
        "num_hidden_layers": 9,
        "num_attention_heads": HEADS,
        "index_n_heads": INDEX_HEADS,
        "index_topk": TOP,
        "compress_ratios": (0, 2, 2, 2, 2, 1, 1, 1, 1),
        "kv_source_layer_ids": (1, 3, 5),
        "index_source_layer_ids": (1, 3, 5, 7),
        "candidate_source_layer_id": 5,
        "candidate_topk_blocks": 5,
        "candidate_block_size": 8,
    }
)
# Window; full, reuse; full, reuse (ratio 2); full with candidates, reuse, reindex within them, reuse (ratio 1); window
# of a draft stage.
SPECS = v41_specs(CONFIG, draft_layers=1)
# Ratio of the entries that each layer attends to.
RATIOS = [SPECS[source_of(SPECS, layer)].ratio for layer in range(len(SPECS))]


def role(spec: LayerKVSpec) -> str:
    if spec.selection is Selection.TOP_K:
        return "full" if spec.ratio else "reindex"
    return "reuse" if spec.selection is Selection.REUSE else "window"


class Layer:
    """Weights of a layer, and the projections of each request by position."""

    def __init__(self, number: int, requests: int) -> None:
        g = torch.Generator().manual_seed(number)
        writes = SPECS[number].ratio

        def drawn(*shape: int) -> Tensor:
            return torch.randn(requests, LENGTH, *shape, generator=g)

        def norm(width: int) -> Tensor:
            return (1 + 0.2 * torch.randn(width, generator=g)).bfloat16()

        self.writes = writes
        self.weights = LayerWeights(
            kv_norm=norm(512),
            rope=rope_table(LENGTH, rope_frequencies(CONFIG, RATIOS[number])),
            eps=EPS,
            entry_norm=norm(512),
            index_norm=norm(128),
        )
        self.kv = drawn(512).bfloat16()
        self.compressor: Tensor | None = None
        if writes == 1:
            self.compressor = drawn(512).bfloat16()
        elif writes == 2:
            score = torch.where(drawn(512) > 0, 200.0, 0.0)
            self.compressor = torch.cat([drawn(512), score], -1)
        picked = torch.randperm(512, generator=g)[:128]
        self.matrix = torch.nn.functional.one_hot(picked, 512).T.bfloat16()
        self.q = drawn(HEADS, 512)
        self.index_q = drawn(INDEX_HEADS, 128).bfloat16()
        self.head_weights = torch.randint(-2, 5, (requests, LENGTH, INDEX_HEADS), generator=g) / 2
        self.sink = torch.randn(HEADS, generator=g)


# The tokens of the last request are drafts that turn out wrong.
REQUESTS = 4


@functools.cache
def layers() -> list[Layer]:
    return [Layer(number, REQUESTS) for number in range(len(SPECS))]


@functools.cache
def weights_on(device: torch.device) -> list[LayerWeights]:
    return [
        replace(layer.weights, **{k: v.to(device) for k, v in vars(layer.weights).items() if isinstance(v, Tensor)})
        for layer in layers()
    ]


# ---- the dense side


def turned(x: Tensor, ratio: int, every: int = 1, back: bool = False) -> Tensor:
    """Rotate the last 64 dims of x [n, ..., D] in fp32, or back in float64. Row i is at position i * every."""
    turns = angles(ratio, LENGTH)[::every]
    turns = turns.view(len(turns), *[1] * (x.dim() - 2), 32)
    turns = -turns.double() if back else turns
    cos, sin = turns.cos(), turns.sin()
    real, imaginary = x[..., -64::2], x[..., -63::2]
    rotated = torch.stack([real * cos - imaginary * sin, imaginary * cos + real * sin], -1).flatten(-2)
    return torch.cat([x[..., :-64], rotated.to(x.dtype)], -1)


def _entries(layer: Layer, ratio: int, request: int) -> tuple[Tensor, Tensor]:
    """Return (entries, index keys) of a whole request."""
    x = layer.compressor[request]
    if ratio == 2:
        k, score = x.unflatten(0, (-1, 2)).split(512, -1)
        x = (k * score.softmax(1)).sum(1).bfloat16()
    latents = normalised(x, layer.weights.entry_norm)
    keys = turned(normalised(latents @ layer.matrix, layer.weights.index_norm), ratio, ratio)
    entries = turned(latents, ratio, ratio)
    return fp4_act_quant(entries.double(), 16, True), fp4_act_quant(keys.double(), 32, False)


def _scores(layer: Layer, keys: Tensor, ratio: int, request: int) -> Tensor:
    """Return scores [LENGTH, entries], with -inf where the query's token comes before the entry's last token."""
    query = fp4_act_quant(turned(layer.index_q[request], ratio).double(), 32, False)
    each = torch.einsum("thd,nd->thn", query, keys).relu()
    scores = (each * layer.head_weights[request].double()[..., None]).sum(1)
    assert torch.equal(scores, scores.float().double()), "the sums are not exact in fp32, so they depend on the order"
    last = torch.arange(len(keys)) * ratio + ratio - 1
    return scores.masked_fill(last > torch.arange(LENGTH)[:, None], float("-inf"))


def _candidates(scores: list[float], size: int, most: int) -> set[int]:
    """Return the entries of the best blocks among the visible entries, which `scores` covers."""
    blocks = [scores[i : i + size] for i in range(0, len(scores), size)]
    ranked = sorted(range(len(blocks)), key=lambda b: (b < len(blocks) - 1, -max(blocks[b]), b))
    return {entry for b in ranked[:most] for entry in range(b * size, (b + 1) * size)}


@functools.cache
def dense(request: int) -> list[Tensor]:
    """Return the attention output [LENGTH, H, 512] of a whole request for each layer."""
    outputs = []
    entries = keys = chosen = candidates = None
    for spec, ratio, layer in zip(SPECS, RATIOS, layers()):
        position = torch.arange(LENGTH)
        back = position[:, None] - position
        rows = act_quant(turned(normalised(layer.kv[request], layer.weights.kv_norm), ratio).double())
        seen = (back >= 0) & (back < 128)
        if spec.ratio:
            entries, keys = _entries(layer, ratio, request)
        if spec.selection is Selection.TOP_K:
            every = [[s for s in row if s > float("-inf")] for row in _scores(layer, keys, ratio, request).tolist()]
            if spec.candidates and spec.candidates.chooses:
                candidates = [
                    _candidates(row, CONFIG.candidate_block_size, CONFIG.candidate_topk_blocks) for row in every
                ]
            within = spec.candidates is not None and not spec.candidates.chooses
            chosen = torch.zeros(LENGTH, len(entries), dtype=torch.bool)
            for t, row in enumerate(every):
                among = [i for i in range(len(row)) if not within or i in candidates[t]]
                chosen[t, sorted(among, key=lambda i: (-row[i], i))[:TOP]] = True
        if ratio:
            rows, seen = torch.cat([rows, entries]), torch.cat([seen, chosen], 1)
        logits = torch.einsum("thd,nd->thn", layer.q[request].double(), rows) * SCALE
        logits = logits.masked_fill(~seen[:, None], float("-inf"))
        sink = layer.sink.double().expand(LENGTH, -1)[..., None]
        share = torch.cat([logits, sink], -1).softmax(-1)[..., :-1]
        out = torch.einsum("thn,nd->thd", share, rows)
        outputs.append(turned(out, ratio, back=True))
    return outputs


# ---- the cache


class Play:
    """The pools of a model, and its requests: the slot, the blocks and the number of tokens of each."""

    def __init__(self, seed: int, draft_tokens: int = 0, device: torch.device = CPU) -> None:
        self.g = torch.Generator().manual_seed(seed)
        self.device, self.draft_tokens = resolve_device(device), draft_tokens
        self.layout = CacheLayout(v41_specs(CONFIG, 1, draft_tokens), device, draft_layers=1)
        self.state = StateStorage(self.layout, 6, snapshots=3)
        self.pools = make_paged_pools(self.layout, dict.fromkeys(self.layout.kinds, 24))
        # The backend's part of a step.
        specs = self.layout.schemas
        scratch = StepScratch(
            device,
            torch.float32,
            TOP,
            KVFormat.MXFP8,
            candidate_blocks=5,
            scored_per_block=128,
            listed_blocks=listed_blocks(TOP, 5),
        )
        tables = [
            LayerTables(
                self.state.ring(i), self.state.compressor_state(i), *(pool.allocations if pool else (None, None))
            )
            for i, pool in enumerate(self.pools)
        ]
        kernels = make_kernels(self.device, 24, HEADS, torch.float32, self.layout.ring_format)
        self.limits, self.ops = entry_limits(specs, TOP), LayerOps(specs, tables, kernels, HEADS, scratch)
        self.block_tables = torch.full((6, 24), -1, dtype=torch.int32, device=device)
        for tensor in [*self.state.allocations, *self.block_allocations]:  # Stale bytes of other requests.
            left = torch.randint(0, 120, tensor.view(torch.uint8).shape, dtype=torch.uint8, generator=self.g)
            tensor.view(torch.uint8).copy_(left)
        self.free = torch.randperm(24, generator=self.g).tolist()
        self.lengths: dict[int, int] = {}
        self.slots: dict[int, int] = {}

    @property
    def block_allocations(self) -> list[Tensor]:
        return [table for pool in self.pools if pool for table in pool.allocations]

    def begin_step(self, requests: list[tuple[int, int, int]], staging_slots: Tensor | None = None) -> StepMetadata:
        """Return a step of requests, given as (slot, tokens before the step, tokens of the step)."""
        slots, prefix, counts = self.ids(*requests).T.contiguous()
        owner = torch.repeat_interleave(torch.arange(len(requests), device=self.device), counts)
        query_start = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        positions = (prefix - query_start[:-1])[owner] + torch.arange(len(owner), device=self.device)
        block_table = self.block_tables[slots.clamp_min(0)]
        is_decode = len({n for *_, n in requests}) == 1 and requests[0][2] <= max(self.draft_tokens, 1)
        metadata = StepMetadata.build(
            slots=slots,
            prefix_lens=prefix,
            query_start=query_start,
            token_request=owner.int(),
            positions=positions,
            out_loc=block_table[owner, positions // 128].long() * 128 + positions % 128,
            block_table=block_table,
            limits=self.limits,
            staging_slots=staging_slots,
            decode_ring_rows=self.layout.ring_rows if is_decode else None,
        )
        self.ops.begin_step(metadata)
        return metadata

    def admit(self, request: int, slot: int) -> None:
        self.lengths[request], self.slots[request] = 0, slot
        self.block_tables[slot] = -1

    def ids(self, *numbers: int | tuple[int, ...]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)

    def resume(self, request: int, slot: int, snapshot: int, length: int, like: int) -> None:
        """Start a request with the tokens of `like` from a snapshot at `length`, sharing the blocks of its slot."""
        self.admit(request, slot)
        self.state.load(self.ids(snapshot), self.ids(slot))
        self.block_tables[slot, : length // 128] = self.block_tables[like, : length // 128]
        self.lengths[request] = length

    def check(
        self,
        counts: dict[int, int],
        tokens_of: dict[int, int] | None = None,
        right: dict[int, int] | None = None,
        staging: dict[int, int] | None = None,
    ) -> None:
        """Run the next `counts` tokens of each request and compare its outputs with the dense ones.

        A request uses the tokens of the request in `tokens_of`, by default its own. Tokens after the first `right` ones
        come from the request with wrong drafts and are rolled back. `staging` gives the slot of a request that receives
        the 128 entries before the step's last multiple of 128.
        """
        tokens = [(r, self.lengths[r] + i, i) for r, n in counts.items() for i in range(n)]
        for r, n in counts.items():
            table = self.block_tables[self.slots[r]]
            for i in range(int((table >= 0).sum()), -(-(self.lengths[r] + n) // 128)):
                table[i] = self.free.pop()
        track = None
        if staging:
            until = {r: (self.lengths[r] + counts[r]) // 128 * 128 for r in staging}
            kept = [r in staging and until[r] - 128 <= t < until[r] for r, t, _ in tokens]
            track = self.ids(*(staging[r] if keep else -1 for keep, (r, _, _) in zip(kept, tokens)))
        step = self.begin_step([(self.slots[r], self.lengths[r], n) for r, n in counts.items()], track)
        like, right = dict(zip(counts, counts)) | (tokens_of or {}), counts | (right or {})
        owner, positions = torch.tensor([r for r, _, _ in tokens]), torch.tensor([t for _, t, _ in tokens])
        who = torch.tensor([like[r] if i < right[r] else REQUESTS - 1 for r, _, i in tokens])
        for number, layer in enumerate(layers()):
            out = run_layer(self.ops, step, number, layer, who, positions).cpu()
            for r, n in right.items():
                here = slice(self.lengths[r], self.lengths[r] + n)
                self.compare(f"request {r}", number, out[owner == r][:n], dense(like[r])[number][here])
        for r, n in right.items():
            self.lengths[r] += n

    def compare(self, who: str, number: int, out: Tensor, expected: Tensor) -> None:
        error = (out.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
        where = f"layer {number} ({role(SPECS[number])}), {who}: off by {error.max():.3g}"
        if self.device == CPU:
            assert error.max() < BOUND, where
        else:
            assert (error < GPU_BOUND).float().mean() > 1 - GPU_MAX_APART, where


def run_layer(ops: LayerOps, step: StepMetadata, number: int, layer: Layer, who: Tensor, positions: Tensor) -> Tensor:
    """Run one layer as a model and the backend do."""
    device = step.slots.device
    weights, window = weights_on(device)[number], None if step.is_decode else ops.scratch.window(step.window_size)

    def of(projections: Tensor) -> Tensor:
        return projections[who, positions].to(device)

    projections = Projections(of(layer.kv), None if layer.compressor is None else of(layer.compressor))
    ops.append(number, weights, projections, step, window, lambda latents: latents @ layer.matrix.to(device))
    query = IndexQuery(of(layer.index_q), of(layer.head_weights), lambda: None)
    inputs = LayerInputs(weights, layer.sink.to(device), lambda: None, accepts_rotated_output=False, index_query=query)
    return ops.attend(of(layer.q), number, SCALE, inputs, step, window).values


def random_requests(seed: int, device: torch.device = CPU) -> None:
    """Run random requests that arrive one after another. Steps are prefills of chunks of some requests and decodes of
    all."""
    play = Play(seed, device=device)
    chunks = (1, 2, 3, 7, 40, 127, 128, 129, 150)
    waiting = torch.randperm(REQUESTS - 1, generator=play.g).tolist()

    def draw(most: int) -> int:
        return int(torch.randint(most, (), generator=play.g))

    while waiting or play.lengths:
        for r in [r for r, n in play.lengths.items() if n == LENGTH]:
            blocks = play.block_tables[play.slots[r]]
            play.free += blocks[blocks >= 0].tolist()
            del play.lengths[r], play.slots[r]
        while waiting and len(play.slots) < 2:
            play.admit(waiting.pop(), min({0, 4} - set(play.slots.values())))
        if not play.lengths:
            return
        room = {r: LENGTH - n for r, n in play.lengths.items()}
        if draw(2):
            for _ in range(min(1 + draw(4), min(room.values()))):
                play.check(dict.fromkeys(room, 1))
            continue
        some = [r for r in room if draw(3)] or list(room)
        play.check({r: min(chunks[draw(len(chunks))], room[r]) for r in some})


@pytest.mark.full
@pytest.mark.parametrize("seed", [0, 1])
def test_chunks_and_single_tokens_equal_dense(seed, device):
    random_requests(seed, device)


def test_resumed_from_a_snapshot(device):
    """The state at 256 tokens is copied between steps, or written as a step passes it. It then resumes in a different
    slot with undefined compressor states, sharing the blocks before it."""
    cold = Play(3, device=device)
    cold.admit(0, slot=1)
    cold.check({0: 120})
    cold.check({0: 180}, staging={0: 4})  # Passes 256.
    cold.state.store(cold.ids(4, -1), cold.ids(1, 2))

    again = Play(4, device=device)
    again.admit(1, slot=2)
    again.check({1: 256}, tokens_of={1: 0})
    again.state.store(again.ids(2), again.ids(3))
    again.check({1: 10}, tokens_of={1: 0})

    for play, snapshot, like in ((cold, 1, 1), (again, 3, 2)):
        play.resume(2, slot=5, snapshot=snapshot, length=256, like=like)
        play.check({2: 43}, tokens_of={2: 0})
        play.check({2: 1}, tokens_of={2: 0})


def test_padding_writes_and_sees_nothing(device):
    """A token without a slot beside one of a request has no effect, whatever its positions and projections. Slot 0 has
    no blocks."""
    play = Play(8, device=device)
    play.admit(0, slot=1)
    play.check({0: 130})
    others = [
        play.state.rings[:, 0],
        *(compressor_state[:, 0] for compressor_state in play.state.compressor_states.values()),
    ]
    pools = play.block_allocations
    before, owned = [tensor.clone() for tensor in (*others, *pools)], play.block_tables[1, :2].tolist()
    step = play.begin_step([(1, 130, 1), (-1, 0, 1)])
    for number, layer in enumerate(layers()):
        out = run_layer(play.ops, step, number, layer, torch.tensor([0, 1]), torch.tensor([130, 0])).cpu()
        play.compare("request 0", number, out[:1], dense(0)[number][130:131])
        assert not out[1].any()
    for table in pools:
        table[owned[1]] = 0
    for tensor, then in zip((*others, *pools), before):
        if len(tensor) == 24:
            then[owned[1]] = 0
        assert torch.equal(tensor, then)


@pytest.mark.parametrize("d", [2, 3, 5])
def test_drafts_are_rolled_back(d, device=CPU):
    """After a step of d tokens with wrong ones, the next step begins at the first wrong token."""
    play = Play(6, draft_tokens=d, device=device)
    for r, slot in ((0, 3), (1, 0)):
        play.admit(r, slot)
    play.check({0: 130, 1: 201})
    for right in ((1, d), (d, 1), (1, 1), (2, d - 1), (d - 1, 2), (1, d), (1, 1), (d, d)):
        play.check({0: d, 1: d}, right=dict(zip((0, 1), right)))


# ---- negative controls: breaking one part changes the outputs


def short_ring(rows: int):
    def patch(monkeypatch) -> None:
        plain = v41_specs
        short = lambda *sizes: tuple(replace(spec, ring_rows=rows) for spec in plain(*sizes))  # noqa: E731
        monkeypatch.setitem(globals(), "v41_specs", short)
        monkeypatch.setattr(chunks, "check", lambda *arguments: None)

    return patch


def short_compressor_state(monkeypatch) -> None:
    monkeypatch.setattr("dsv4_sglang.cache.specs_v41.pair_rows", lambda d: 2)
    monkeypatch.setattr(chunks, "check", lambda *arguments: None)


def entry_visible_a_token_early(monkeypatch) -> None:
    plain, lens = read.select, step_module.visible_entries

    def select(query, weights, table, blocks, owner, visible, *rest) -> None:
        plain(query, weights, table, blocks, owner, (visible + 1).clamp_max(LENGTH), *rest)

    monkeypatch.setattr(read, "select", select)
    monkeypatch.setattr(step_module, "visible_entries", lambda lengths, *rest: lens(lengths + 1, *rest))


def other_selection_in_a_reuse_layer(monkeypatch) -> None:
    """Layer 8 uses the selection of layer 5 instead of layer 7. Both select rows of the same table."""
    plain, first = LayerOps._entries, {}

    def stale(ops: LayerOps, layer: int, inputs: LayerInputs, step: StepMetadata):
        entries = plain(ops, layer, inputs, step)
        if layer == 5:
            first["entries"] = entries._replace(indices=entries.indices.clone())
        return first["entries"] if layer == 8 else entries

    monkeypatch.setattr(LayerOps, "_entries", stale)


def entries_of_another_layer(monkeypatch) -> None:
    """Layer 4 uses the entries of layer 1 instead of layer 3."""
    monkeypatch.setattr(layer_ops, "source_of", lambda specs, layer: 1 if layer == 4 else source_of(specs, layer))


def candidates_left_out(monkeypatch) -> None:
    monkeypatch.setattr(read, "_in_blocks", lambda blocks, size, entries: torch.ones(len(blocks), entries).bool())


def newest_block_left_out(monkeypatch) -> None:
    plain = read._best_blocks
    wrong = lambda score, visible, *rest: plain(score, torch.zeros_like(visible), *rest)  # noqa: E731
    monkeypatch.setattr(read, "_best_blocks", wrong)


@pytest.mark.parametrize(
    ("fault", "said", "draft_tokens"),
    [
        pytest.param(short_ring(127), r"layer 0 \(window\)", 0, id="ring of 127 rows"),
        # The ring has one row less than 127 plus the step's tokens. The step's last token overwrites a row that its
        # first token still sees.
        pytest.param(short_ring(130), r"layer 0 \(window\)", 5, id="ring of 130 rows"),
        (short_compressor_state, r"layer 1 \(full\)", 5),
        (entry_visible_a_token_early, r"layer [135] \(full\)", 0),
        (other_selection_in_a_reuse_layer, r"layer 8 \(reuse\)", 0),
        (entries_of_another_layer, r"layer 4 \(reuse\)", 0),
        (candidates_left_out, r"layer 7 \(reindex\)", 0),
        (newest_block_left_out, r"layer 7 \(reindex\)", 0),
    ],
)
def test_injected_faults_are_detected(fault, said, draft_tokens, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=said):
        test_drafts_are_rolled_back(draft_tokens) if draft_tokens else random_requests(0)


# ---- selection by itself


# First and last position + 1 of each request's tokens.
LENS = {
    "many": [(150, 201), (0, 3), (77, 78), (599, 602)],
    "few": [(40, 70), (0, 5), (120, 131)],
}


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize(("lens", "top", "size", "most"), [("many", 24, 8, 9), ("few", 64, 8, 3), ("few", 16, 4, 40)])
@pytest.mark.parametrize("equal", [False, True], ids=["", "ties"])
def test_selection_in_two_levels(ratio, lens, top, size, most, equal):
    """Cases include fewer candidates than are selected, and all blocks as candidates. Of equal scores the lowest
    indices are selected."""
    case = candidate_case(lens=LENS[lens], ratio=ratio, top=top, equal=equal)
    kept = case.candidates(most)
    first, second = case.entries(size, kept=kept), case.entries(size, within=kept)

    def best(scores: list[float], among: set[int]) -> list[int]:
        return sorted(sorted(among, key=lambda i: (-scores[i], i))[:top])

    for t, seen in enumerate(case.visible.tolist()):
        scores = case.scores(t).tolist()
        candidates = {i for i in _candidates(scores, size, most) if i < seen} if seen else set()
        blocks = [b for b in kept[t].tolist() if b >= 0]
        assert sorted(candidates) == [i for b in blocks for i in range(b * size, min(b * size + size, seen))]
        assert first[t] == best(scores, set(range(seen)))
        assert second[t] == best(scores, candidates)


@pytest.mark.parametrize("ratio", [1, 2])
def test_selection_equals_that_of_sglang(ratio):
    """Compare scores, candidates and selection with SGLang's torch versions, also with fewer candidates than are
    selected."""
    from sglang.kernels.ops.attention.dsv4 import candidate_blocks
    from sglang.kernels.ops.quantization.fp4_fake_quant import fake_quant_fp4
    from sglang.srt.layers.attention.dsv4.dsv41_sparse import DeepseekV41Indexer, rope_tail

    case = candidate_case(lens=[(150 * ratio, 200 * ratio)], ratio=ratio, top=24)
    freqs = torch.view_as_complex(case.rope[case.positions].unflatten(-1, (-1, 2)))
    query = fake_quant_fp4(rope_tail(case.q, freqs, 64))
    same(case.query.flatten(1), query.float().flatten(1))
    scores = DeepseekV41Indexer.scores(None, query.float(), case.keys(0), case.weights)
    scores.masked_fill_(torch.arange(200) >= case.visible[:, None], float("-inf"))
    for t, seen in enumerate(case.visible.tolist()):
        assert torch.allclose(scores[t, :seen].double(), case.scores(t))
    best = scores.unflatten(1, (-1, 8)).amax(-1)

    def value(of: Tensor, chosen: list[list[int]]) -> list[list[float]]:
        """Return sorted values, because SGLang may select any of equal scores."""
        return [sorted(of[t, row].tolist()) for t, row in enumerate(chosen)]

    for most in (2, 9):
        kept = case.candidates(most)
        first, second = case.entries(8, kept=kept), case.entries(8, within=kept)
        ids = candidate_blocks.select_candidate_block_ids(scores, case.visible[:, None], most, 8)
        assert value(best, ids.tolist()) == value(best, kept.tolist())
        assert all(seen - 1 in range(8 * row[-1], 8 * row[-1] + 8) for seen, row in zip(case.visible, kept.tolist()))
        among = candidate_blocks.topk_among_blocks(scores, case.visible, kept, 24, 8).tolist()
        assert value(scores, [[i for i in row if i >= 0] for row in among]) == value(scores, second)
        assert value(scores, scores.topk(24).indices.tolist()) == value(scores, first)


def test_queries_have_every_scale():
    """Queries are MXFP4 as in training. Tiny and large values keep their scale, which the container of an index key
    would clamp."""
    g = torch.Generator().manual_seed(0)
    x = (torch.randn(64, 128, generator=g) * 2.0 ** torch.randint(-20, 20, (64, 1), generator=g)).bfloat16()
    assert torch.equal(mxfp4_values(x), fp4_act_quant(x.double(), 32, False).float())
    assert not mxfp4_values(torch.zeros(2, 128)).any()


# ---- pools


def test_only_layers_that_write_entries_own_some():
    play = Play(0)
    assert [number for number, pool in enumerate(play.pools) if pool] == [1, 3, 5]
    assert [tuple(pool.entries.shape[1:]) for pool in play.pools if pool] == [(64, 288), (64, 288), (128, 288)]
    shapes = [
        None if play.state.compressor_state(i) is None else play.state.compressor_state(i).shape for i in (1, 2, 5)
    ]
    assert shapes == [(6, 1, 1024), None, None]
    layout = play.layout
    assert layout.block_bytes == 128 * 2 * 360 and layout.snapshot_bytes == 10 * 128 * 528
    assert sum(pool.memory_bytes() for pool in play.pools if pool) == 24 * layout.block_bytes
    assert play.state.memory_bytes() == 6 * layout.slot_bytes + 3 * layout.snapshot_bytes
