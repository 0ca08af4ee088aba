"""A whole DeepSeek-V4.1 cache (SPEC 11): requests in chunks and single tokens through all layers of a small model,
compared with a dense computation.

The dense side has for each request and layer one vector a position, computed in one go by DeepSeek's formulas
(`v41_formulas`), and from them scores, both levels of the selection and the softmax, token by token, in float64: no
ring, no block, no slot, no chunk. Inputs and the way to rotate make all that is rounded or chosen the same in any order
of sums: a pair's scores are equal or far apart, the indexer's matrix picks channels, head weights are multiples of 1/2.
"""

import functools
import importlib.metadata

import pytest
import torch
from packaging.version import Version
from torch import Tensor
from v41_formulas import EPS, act_quant, angles, fp4_act_quant, normalised

from dsv4_sglang.cache import step as step_module
from dsv4_sglang.cache.v41 import V41LayerSchema, V41Layout, V41PagedPool
from dsv4_sglang.cache.v41_cache import V41Cache
from dsv4_sglang.cache.v41_step import V41LayerWeights, V41Step
from dsv4_sglang.formats.index_keys import mxfp4_values
from dsv4_sglang.model.rope import rope_frequencies
from dsv4_sglang.model.v41 import Csa2Role, V41Config, v41_schedule
from dsv4_sglang.ops.reference import append_v41, read, read_v41
from dsv4_sglang.ops.rope import rope_table

LENGTH, HEADS, INDEX_HEADS, TOP = 420, 3, 32, 12
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
        "candidate_block_size": 4,
    }
)
SCHEDULE = v41_schedule(CONFIG, draft_layers=1)
"""Window; full, reuse; full, reuse (ratio 2); full with candidates, reuse, reindex within them, reuse (ratio 1); window
of a draft stage."""


class Layer:
    """A layer's weights, and every projection of each request, by position."""

    def __init__(self, number: int, requests: int) -> None:
        spec = SCHEDULE[number]
        g = torch.Generator().manual_seed(number)
        writes = spec.ratio if spec.role is Csa2Role.FULL else 0

        def drawn(*shape: int) -> Tensor:
            return torch.randn(requests, LENGTH, *shape, generator=g)

        def norm(width: int) -> Tensor:
            return (1 + 0.2 * torch.randn(width, generator=g)).bfloat16()

        self.writes = writes
        self.weights = V41LayerWeights(
            kv_norm=norm(512),
            rope=rope_table(LENGTH, rope_frequencies(CONFIG, spec.ratio)),
            eps=EPS,
            latent_norm=norm(512),
            key_norm=norm(128),
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


REQUESTS = 4


@functools.cache
def layers() -> list[Layer]:
    return [Layer(number, REQUESTS) for number in range(len(SCHEDULE))]


# ---- the dense side


def turned(x: Tensor, ratio: int, every: int = 1, back: bool = False) -> Tensor:
    """[n, ..., D], whose row i is at the position i * every: the last 64 dims rotated in fp32, or back in float64."""
    turns = angles(ratio, LENGTH)[::every]
    turns = turns.view(len(turns), *[1] * (x.dim() - 2), 32)
    turns = -turns.double() if back else turns
    cos, sin = turns.cos(), turns.sin()
    real, imaginary = x[..., -64::2], x[..., -63::2]
    tail = torch.stack([real * cos - imaginary * sin, imaginary * cos + real * sin], -1).flatten(-2)
    return torch.cat([x[..., :-64], tail.to(x.dtype)], -1)


def _entries(layer: Layer, ratio: int, request: int) -> tuple[Tensor, Tensor]:
    """(entries, index keys) of a whole request."""
    x = layer.compressor[request]
    if ratio == 2:
        k, score = x.unflatten(0, (-1, 2)).split(512, -1)
        x = (k * score.softmax(1)).sum(1).bfloat16()
    latents = normalised(x, layer.weights.latent_norm)
    keys = turned(normalised(latents @ layer.matrix, layer.weights.key_norm), ratio, ratio)
    entries = turned(latents, ratio, ratio)
    return fp4_act_quant(entries.double(), 16, True), fp4_act_quant(keys.double(), 32, False)


def _scores(layer: Layer, keys: Tensor, ratio: int, request: int) -> Tensor:
    """[LENGTH, entries], -inf where the query's token comes before the entry's last one."""
    query = fp4_act_quant(turned(layer.index_q[request], ratio).double(), 32, False)
    each = torch.einsum("thd,nd->thn", query, keys).relu()
    scores = (each * layer.head_weights[request].double()[..., None]).sum(1)
    assert torch.equal(scores, scores.float().double()), "every order of the sums gives the same"
    last = torch.arange(len(keys)) * ratio + ratio - 1
    return scores.masked_fill(last > torch.arange(LENGTH)[:, None], float("-inf"))


def _candidates(scores: list[float], size: int, most: int) -> set[int]:
    """Entries of the best blocks among the visible ones, which `scores` has."""
    blocks = [scores[i : i + size] for i in range(0, len(scores), size)]
    ranked = sorted(range(len(blocks)), key=lambda b: (b < len(blocks) - 1, -max(blocks[b]), b))
    return {entry for b in ranked[:most] for entry in range(b * size, (b + 1) * size)}


@functools.cache
def dense(request: int) -> list[Tensor]:
    """Of each layer the attention output [LENGTH, H, 512] of a whole request."""
    outputs = []
    entries = keys = chosen = candidates = None
    for spec, layer in zip(SCHEDULE, layers()):
        position = torch.arange(LENGTH)
        back = position[:, None] - position
        rows = act_quant(turned(normalised(layer.kv[request], layer.weights.kv_norm), spec.ratio).double())
        seen = (back >= 0) & (back < 128)
        if spec.role is Csa2Role.FULL:
            entries, keys = _entries(layer, spec.ratio, request)
        if spec.role in (Csa2Role.FULL, Csa2Role.REINDEX):
            every = [
                [s for s in row if s > float("-inf")] for row in _scores(layer, keys, spec.ratio, request).tolist()
            ]
            if spec.keeps_candidates:
                candidates = [
                    _candidates(row, CONFIG.candidate_block_size, CONFIG.candidate_topk_blocks) for row in every
                ]
            chosen = torch.zeros(LENGTH, len(entries), dtype=torch.bool)
            for t, row in enumerate(every):
                among = [i for i in range(len(row)) if not spec.within_candidates or i in candidates[t]]
                chosen[t, sorted(among, key=lambda i: (-row[i], i))[:TOP]] = True
        if spec.ratio:
            rows, seen = torch.cat([rows, entries]), torch.cat([seen, chosen], 1)
        logits = torch.einsum("thd,nd->thn", layer.q[request].double(), rows) * SCALE
        logits = logits.masked_fill(~seen[:, None], float("-inf"))
        sink = layer.sink.double().expand(LENGTH, -1)[..., None]
        share = torch.cat([logits, sink], -1).softmax(-1)[..., :-1]
        out = torch.einsum("thn,nd->thd", share, rows)
        outputs.append(turned(out, spec.ratio, back=True))
    return outputs


# ---- the cache


class Play:
    """Requests in a cache; of each its slot, its blocks and how many tokens it has."""

    def __init__(self, seed: int, draft_tokens: int = 0) -> None:
        self.g = torch.Generator().manual_seed(seed)
        self.cache = V41Cache(
            CONFIG, num_slots=6, num_blocks=24, checkpoints=3, draft_tokens=draft_tokens, draft_layers=1, device="cpu"
        )
        for tensor in self.cache.state.allocations:  # what another request left
            tensor.view(torch.uint8).random_(0, 120, generator=self.g)
        for pool in filter(None, self.cache.pools):
            for table in pool.allocations:
                table.random_(0, 120, generator=self.g)
        self.free = torch.randperm(24, generator=self.g).tolist()
        self.lengths: dict[int, int] = {}
        self.slots: dict[int, int] = {}

    def admit(self, request: int, slot: int) -> None:
        self.lengths[request], self.slots[request] = 0, slot
        self.cache.block_tables[slot] = -1

    def resume(self, request: int, slot: int, checkpoint: int, length: int, like: int) -> None:
        """A request of the tokens of `like`, whose slot has its blocks, from a checkpoint at `length`."""
        self.admit(request, slot)
        self.cache.state.load(torch.tensor([checkpoint]).int(), torch.tensor([slot]).int())
        self.cache.block_tables[slot, : length // 128] = self.cache.block_tables[like, : length // 128]
        self.lengths[request] = length

    def step(
        self, counts: dict[int, int], tokens_of: dict[int, int] | None = None, staging: dict[int, int] | None = None
    ) -> dict[int, list[Tensor]]:
        """The next `counts` tokens of each request, whose projections are those of `tokens_of`; its outputs of all
        layers. `staging`: of a request the slot that takes its rows up to the step's last multiple of 128."""
        spans = {r: (self.lengths[r], self.lengths[r] + n) for r, n in counts.items()}
        for r, (_, end) in spans.items():
            table = self.cache.block_tables[self.slots[r]]
            for i in range(int((table >= 0).sum()), -(-end // 128)):
                table[i] = self.free.pop()
        owner = torch.tensor([r for r, n in counts.items() for _ in range(n)])
        positions = torch.tensor([t for span in spans.values() for t in range(*span)])
        track = None
        if staging:
            until = {r: spans[r][1] // 128 * 128 for r in staging}
            track = torch.tensor(
                [
                    staging[r] if r in staging and t < until[r] else -1
                    for r, t in zip(owner.tolist(), positions.tolist())
                ]
            ).int()
        step = self.cache.begin_step(torch.tensor([self.slots[r] for r in owner.tolist()]), positions, owner, track)
        who = torch.tensor([(tokens_of or {}).get(r, r) for r in owner.tolist()])
        outputs: dict[int, list[Tensor]] = {r: [] for r in counts}
        for number, (spec, layer) in enumerate(zip(SCHEDULE, layers())):
            out = run_layer(step, number, layer, who, positions)
            for r in counts:
                outputs[r].append(out[owner == r])
        for r, (_, end) in spans.items():
            self.lengths[r] = end
        return outputs

    def check(self, counts: dict[int, int], **given) -> None:
        """A step whose outputs are the dense ones."""
        before = dict(self.lengths)
        for r, outputs in self.step(counts, **given).items():
            like = (given.get("tokens_of") or {}).get(r, r)
            for number, out in enumerate(outputs):
                expected = dense(like)[number][before[r] : before[r] + counts[r]]
                error = (out.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
                worst = int(error.amax(-1).argmax())
                assert error.max() < BOUND, (
                    f"layer {number} ({SCHEDULE[number].role.value}), request {r}, position {before[r] + worst}: "
                    f"off by {error.max():.3g}"
                )


def run_layer(step: V41Step, number: int, layer: Layer, who: Tensor, positions: Tensor) -> Tensor:
    """What a model does in a layer."""
    spec, weights = SCHEDULE[number], layer.weights
    compressor = None if layer.compressor is None else layer.compressor[who, positions]
    latents = step.append(number, weights, layer.kv[who, positions], compressor)
    if latents is not None:
        step.append_keys(number, weights, latents @ layer.matrix)
    if spec.index_source == number:
        step.select(number, weights, layer.index_q[who, positions], layer.head_weights[who, positions])
    return step.attend(number, weights, layer.q[who, positions], layer.sink, SCALE)


BOUND = 1e-5


def random_requests(seed: int) -> None:
    """Requests come one after another; steps are prefills of chunks of some of them and decodes of all."""
    play = Play(seed)
    chunks = (1, 2, 3, 7, 40, 127, 128, 129, 150)
    waiting = torch.randperm(REQUESTS, generator=play.g).tolist()

    def draw(most: int) -> int:
        return int(torch.randint(most, (), generator=play.g))

    while waiting or play.lengths:
        for r in [r for r, n in play.lengths.items() if n == LENGTH]:
            blocks = play.cache.block_tables[play.slots[r]]
            play.free += blocks[blocks >= 0].tolist()
            del play.lengths[r], play.slots[r]
        while waiting and len(play.slots) < 3:
            play.admit(waiting.pop(), min(set(range(3)) - set(play.slots.values())))
        if not play.lengths:
            return
        room = {r: LENGTH - n for r, n in play.lengths.items()}
        if draw(2):
            for _ in range(min(1 + draw(4), min(room.values()))):
                play.check(dict.fromkeys(room, 1))
            continue
        some = [r for r in room if draw(3)] or list(room)
        play.check({r: min(chunks[draw(len(chunks))], room[r]) for r in some})


@pytest.mark.parametrize("seed", [0, 1])
def test_chunks_and_single_tokens_equal_dense(seed):
    random_requests(seed)
