"""Inputs of `attend` and `index_topk` with every corner in them, and how results are compared with the reference.

Everything is made on the CPU from a seed; `to` moves a case to a device.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_sglang.attention.base import AttendInputs
from dsv4_sglang.attention.metadata import StepMetadata, build_prefill
from dsv4_sglang.cache.step import v4_limits
from dsv4_sglang.formats import KeyFormat, KVBuffer, KVFormat, index_keys, kv_entries
from dsv4_sglang.model.geometry import CSA_RATIO
from dsv4_sglang.ops.reference import read
from dsv4_sglang.ops.rope import rope_table

SCALE = 512**-0.5
GARBAGE = 1 << 30  # behind the length of a list
# Formats of DeepSeek-V4.1, as arguments of `attend_case`.
BLOCK_SCALED = {"kv_format": KVFormat.MXFP8, "entry_format": KVFormat.NVFP4}
# Bound of `assert_attends` for them in fp32: logits are up to 125, sums of 512 products. Partial sums of about half of
# that round by 2^-25 of themselves, 512 roundings add up to sqrt(512) of one: 4e-5, and a weight is off by as much. The
# reference is 1.2e-5 from fp64.
BLOCK_SCALED_FP32_BOUND = 6e-5


def rope(positions: int = 4096) -> Tensor:
    return rope_table(positions, 160000.0 ** (-torch.arange(0, 64, 2) / 64))


def kv_buffer(
    blocks: int, per_block: int, kv_format: KVFormat, used: Tensor, spread: float, g: torch.Generator
) -> Tensor:
    """A table of random rows where `used`, else of NaN bytes, which no attention kernel may let through. With several
    scales to an entry, also rows differ by powers of ten, and the first row has a scale of its smallest value."""
    table = torch.empty(blocks, per_block, kv_format.width, dtype=kv_format.dtype)
    table.view(torch.uint8).fill_(0xFF)
    if len(used):
        # Channels differ by powers of ten: the small ones become subnormal e4m3 numbers.
        values = torch.randn(len(used), kv_entries.ENTRY_DIM, generator=g) * spread
        values[:, 300:310] *= 1e-2
        values[:, 310:320] *= 1e-3
        if kv_format in (KVFormat.MXFP8, KVFormat.NVFP4):
            values *= 10.0 ** (torch.arange(len(used)) % 4 - 2)[:, None]
            values[0, :32] = 0
        KVBuffer(table, kv_format).write(used, values)
    return table


@dataclass
class AttendCase:
    """Arguments of `attend` in order, and the ratio of the layer where an attention kernel needs it."""

    q: Tensor
    sink: Tensor
    window: Tensor
    window_indices: Tensor
    window_lens: Tensor
    entries: Tensor | None
    entry_indices: Tensor | None
    entry_lens: Tensor | None
    positions: Tensor
    rope: Tensor
    scale: float = SCALE
    kv_format: KVFormat = KVFormat.FP8
    entry_owner: Tensor | None = None
    ratio: int = 0
    entry_format: KVFormat | None = None

    def args(self, device: torch.device | str = "cpu") -> tuple:
        moved = [x.to(device) if isinstance(x, Tensor) else x for x in vars(self).values()]
        *tensors, _, owner, _, _ = moved
        return *tensors, self.kv_format.code, owner, None if self.entry_format is None else self.entry_format.code

    def inputs(self, device: torch.device | str = "cpu") -> tuple[Tensor, AttendInputs]:
        """Return the query and the other inputs of an attention kernel's `attend`."""
        q, *rest = self.args(device)
        return q, AttendInputs.from_op(*rest)._replace(ratio=self.ratio)

    def expected(self) -> Tensor:
        return read.attend(*self.args())


def _list(tokens: int, width: int, lens: Tensor, table_rows: int, g: torch.Generator) -> Tensor:
    """Distinct rows a token, one hole of -1 in longer lists, garbage behind the length."""
    out = torch.stack([torch.randperm(max(table_rows, width), generator=g)[:width] % table_rows for _ in range(tokens)])
    out = out.int()
    for t in range(tokens):
        n = int(lens[t])
        if n > 2 and t % 2:
            out[t, n // 2] = -1
        out[t, n:] = GARBAGE
    return out


def attend_case(
    *,
    tokens: int,
    heads: int,
    width: int | None,
    kv_format: KVFormat = KVFormat.FP8,
    entry_format: KVFormat | None = None,
    q_dtype: torch.dtype = torch.bfloat16,
    per_block: int | None = 32,
    ring_rows: int = 128,
    lens: list[tuple[int, int]] | None = None,
    shared: int = 0,
    seed: int = 0,
) -> AttendCase:
    """`entry_format`: of compressed entries, None: `kv_format`. `lens`: (window, entries) a token, cycled; default
    every corner. `width`: of the entry list, None: no entries; `per_block`: rows a block of the entry table, None: one
    block, with an odd number of rows; `ring_rows`: rows a block of the window table; `shared`: number of entry lists,
    which the tokens share, 0: one a token.
    """
    g = torch.Generator().manual_seed(seed)
    k = width or 0
    if lens is None:
        lens = [(128, k), (0, 0), (1, 0), (127, min(k, 1)), (64, min(k, 63))]
        lens += [(128, min(k, 65)), (65, 0), (0, k), (77, k // 2)]
    cycled = [lens[t % len(lens)] for t in range(tokens)]
    window_lens = torch.tensor([a for a, _ in cycled]).int()
    entry_lens = torch.tensor([min(b, k) for _, b in cycled]).int()
    window_indices = _list(tokens, 128, window_lens, 3 * ring_rows, g)
    if tokens > 4:
        window_indices[4, : int(window_lens[4])] = -1  # a list with a length and nothing in it
    window_used = window_indices[(window_indices >= 0) & (window_indices < GARBAGE)].unique()
    window = kv_buffer(3, ring_rows, kv_format, window_used, 1.0, g)
    entries = entry_indices = None
    if width is not None:
        table_rows = 2 * width + 1
        blocks, per_block = (1, table_rows) if per_block is None else (-(-table_rows // per_block), per_block)
        list_lens = torch.full((shared,), width) if shared else entry_lens
        entry_indices = _list(shared or tokens, width, list_lens, blocks * per_block, g)
        used = entry_indices[(entry_indices >= 0) & (entry_indices < GARBAGE)].unique()
        entries = kv_buffer(blocks, per_block, entry_format or kv_format, used, 3.0, g)
    sink = torch.randn(heads, generator=g)
    for i, extreme in enumerate((1e4, -1e4, float("-inf"), 30.0)):
        if heads > 4:
            sink[i] = extreme
    return AttendCase(
        q=torch.randn(tokens, heads, kv_entries.ENTRY_DIM, generator=g).to(q_dtype),
        sink=sink,
        window=window,
        window_indices=window_indices,
        window_lens=window_lens,
        entries=entries,
        entry_indices=entry_indices,
        entry_lens=None if width is None else entry_lens,
        positions=torch.randint(0, 4096, (tokens,), generator=g),
        rope=rope(),
        kv_format=kv_format,
        entry_format=entry_format,
        entry_owner=torch.randint(0, shared, (tokens,), generator=g).int() if shared else None,
    )


def prefill_case(
    *, ratio: int, kv_format: KVFormat, heads: int, entry_format: KVFormat | None = None
) -> tuple[StepMetadata, int, AttendCase]:
    """A prefill step of three requests, two of which share their first block, with long and short prefixes and chunks,
    and of three tokens that only fill it up; the blocks of the requests after it; and one layer's `attend`.
    """
    g = torch.Generator().manual_seed(ratio)
    prefix, chunk, top, padding = torch.tensor([130, 0, 128]), torch.tensor([30, 7, 1]), 8, 3
    pages = torch.tensor([[0, 0], [5, 2], [7, 0], [5, 3]], dtype=torch.int32)
    positions = torch.cat([*(torch.arange(p, p + n) for p, n in zip(prefix, chunk)), torch.zeros(padding).long()])
    tokens, lengths = len(positions), prefix + chunk
    step = build_prefill(
        req_pool_indices=torch.arange(1, 4),
        prefix_lens=prefix,
        chunk_lens=chunk,
        positions=positions,
        out_loc=torch.zeros(tokens, dtype=torch.int64),
        req_to_token=(pages[:, :, None] * 128 + torch.arange(128)).view(4, -1).int(),
        state_slot_of_request=torch.arange(4),
        staging_slots=None,
        snapshot_lens=None,
        limits=v4_limits(top) if entry_format is None else {2: top, 1: top},
        max_length=int(lengths.max()),
        padding=padding,
    )
    entries = entry_indices = entry_lens = entry_owner = None
    if ratio in (1, 2, 4):
        per_block = 128 // ratio
        entries = kv_buffer(8, per_block, entry_format or kv_format, torch.arange(8 * per_block), 3.0, g)
        entry_indices, entry_lens = torch.full((tokens, top), GARBAGE, dtype=torch.int32), step.entry_lens[ratio]
        for t, n in enumerate(entry_lens.tolist()):
            entry = torch.randperm((int(positions[t]) + 1) // ratio, generator=g)[:n].sort().values
            blocks = step.block_table[step.token_request[t]][entry // per_block]
            entry_indices[t, :n] = blocks * per_block + entry % per_block
    elif ratio == 128:
        entries = kv_buffer(1, 8, kv_format, torch.arange(8), 3.0, g)
        entry_indices, entry_lens, entry_owner = step.hca_list()
    case = AttendCase(
        q=torch.randn(tokens, heads, kv_entries.ENTRY_DIM, generator=g).bfloat16(),
        sink=torch.randn(heads, generator=g),
        window=kv_buffer(1, step.window_size, kv_format, torch.arange(step.window_size), 1.0, g),
        window_indices=step.window_indices,
        window_lens=step.window_lens,
        entries=entries,
        entry_indices=entry_indices,
        entry_lens=entry_lens,
        positions=positions,
        rope=rope(),
        kv_format=kv_format,
        entry_owner=entry_owner,
        ratio=ratio,
        entry_format=entry_format,
    )
    return step, int((-(-lengths // 128)).sum()), case


def assert_attends(out: Tensor, case: AttendCase, bound: float) -> None:
    """Error of each token and head relative to it below `bound`, zeros where the reference has zeros."""
    expected, got = case.expected().double(), out.cpu().double()
    assert got.shape == expected.shape, (got.shape, expected.shape)
    size = expected.norm(dim=-1)
    error = (got - expected).norm(dim=-1) / size.clamp_min(1e-30)
    bad = ~(error < bound)
    bad[size == 0] = (got != 0).any(-1)[size == 0]
    if bad.any():
        t, h = bad.nonzero()[0].tolist()
        entries = 0 if case.entry_lens is None else int(case.entry_lens[t])
        pieces = [float((got - expected)[t, h, a:b].norm()) for a, b in ((0, 256), (256, 384), (384, 448), (448, 512))]
        raise AssertionError(
            f"{int(bad.sum())} of {bad.numel()} (token, head) pairs differ by more than {bound}, tokens "
            f"{bad.any(1).nonzero().flatten().tolist()[:20]}, heads {bad.any(0).nonzero().flatten().tolist()[:20]}. "
            f"First: token {t}, head {h}, window {int(case.window_lens[t])}, entries {entries}, "
            f"sink {case.sink[h]:.4g}, error {error[t, h]:.4g}, in the pieces of the entry {pieces} of {size[t, h]:.4g}"
        )


def assert_quantised(codes: Tensor, scales: Tensor, values: Tensor, share: float) -> None:
    """Check e4m3 codes and the scales of groups of 128 channels. At most `share` of the codes may differ, by the
    rounding of ties."""
    grouped = values.float().unflatten(-1, (-1, 128))
    assert torch.allclose(scales, grouped.abs().amax(-1).clamp_min(1e-10) / 448, rtol=1e-5)
    exact = (grouped / scales[..., None]).clamp(-448, 448)
    expected, got = exact.to(torch.float8_e4m3fn).float(), codes.float().view(exact.shape)
    # Triton's interpreter loses the carry of a value that rounds up to a power of two.
    carries = (expected.abs() > exact.abs()) & (torch.frexp(expected).mantissa.abs() == 0.5)
    differs = (got != expected) & ~carries
    assert carries.float().mean() < 0.1 and differs.float().mean() < share, f"{int(differs.sum())} codes differ"
    assert ((got - expected).abs() <= expected.abs() / 7 + 2**-9)[~carries].all()


@dataclass
class IndexInputs:
    """The first arguments of `index_topk`, in order."""

    q: Tensor
    weights: Tensor
    index_keys: Tensor
    block_table: Tensor
    token_request: Tensor
    positions: Tensor
    rope: Tensor


@dataclass
class IndexCase(IndexInputs):
    """Arguments of `index_topk` in order, less the scratch and the output."""

    key_format: KeyFormat
    top: int

    @property
    def visible(self) -> Tensor:
        return (self.positions + 1) // 4

    def args(self, device: torch.device | str = "cpu", slices: int | None = None, width: int | None = None) -> tuple:
        """All arguments, the output filled with a wrong number. `slices`: rows of the scratch; `width`: its columns."""
        inputs = [x.to(device) if isinstance(x, Tensor) else x for x in list(vars(self).values())[:-2]]
        tokens = len(self.positions)
        width = width or int(self.visible.max())
        scores = torch.full((slices or tokens, width), float("nan"), device=device)
        return (
            *inputs,
            self.key_format.code,
            scores,
            torch.full((tokens, self.top), -7, dtype=torch.int32, device=device),
        )

    def expected(self) -> Tensor:
        args = self.args()
        read.index_topk(*args)
        return args[-1]

    def scores(self, t: int, query: Tensor | None = None) -> Tensor:
        """Scores of the visible entries of token t in fp64, with `query` [T, Hi, 128] instead of the reference's."""
        if query is None:
            one = slice(t, t + 1)
            own = read.index_query(self.q[one], self.positions[one], self.rope, self.key_format)[0]
        else:
            own = query[t]
        entry = torch.arange(int(self.visible[t]))
        table = self.block_table[int(self.token_request[t])].long()
        stored = KVBuffer(self.index_keys, self.key_format)
        keys = stored.read(table[entry // 32] * 32 + entry % 32).double()
        return ((own.double() @ keys.T).relu() * self.weights[t].double().unsqueeze(-1)).sum(0)


def index_inputs(
    lens: list[tuple[int, int]],
    ratio: int,
    key_format: KeyFormat,
    key_of: Callable[[Tensor], Tensor],
    repeat_keys: int,
    heads: int,
    g: torch.Generator,
) -> dict[str, Tensor]:
    """Return the inputs that do not depend on the op: keys in shuffled blocks, block tables, tokens and queries.

    Args:
        lens: first and last position + 1 of each request's tokens in the step.
        ratio: tokens per entry.
        key_format: format of the keys. Unseen slots hold NaN bytes.
        key_of: maps random rows to keys.
        repeat_keys: only that many different keys, so that scores tie; 0: all differ.
        heads: number of heads.
        g: source of the random numbers.
    """
    per_block, counts = 128 // ratio, [-(-end // 128) + 1 for _, end in lens]
    table = torch.zeros(len(lens), max(counts), dtype=torch.int32)
    keys = torch.empty(sum(counts), per_block, key_format.width, dtype=key_format.dtype)
    keys.view(torch.uint8).fill_(0x7F if key_format.is_fp4 else 0xFF)
    shuffled = torch.randperm(sum(counts), generator=g).int().split(counts)
    for i, (blocks, (_, end)) in enumerate(zip(shuffled, lens)):
        table[i, : len(blocks)] = blocks
        entry = torch.arange(end // ratio)
        y = torch.randn(max(len(entry), repeat_keys), 128, generator=g)
        row = blocks.long()[entry // per_block] * per_block + entry % per_block
        KVBuffer(keys, key_format).write(row, key_of(y[entry % repeat_keys if repeat_keys else entry]))
    tokens = sum(end - begin for begin, end in lens)
    return {
        "q": torch.randn(tokens, heads, 128, generator=g),
        "index_keys": keys,
        "block_table": table,
        "token_request": torch.cat([torch.full((b - a,), i) for i, (a, b) in enumerate(lens)]).int(),
        "positions": torch.cat([torch.arange(a, b) for a, b in lens]),
        "rope": rope(max(end for _, end in lens)),
    }


def index_case(
    *,
    lens: list[tuple[int, int]],
    heads: int,
    top: int,
    key_format: KeyFormat = KeyFormat.MXFP4,
    q_dtype: torch.dtype = torch.bfloat16,
    repeat_keys: int = 0,
    weights: str = "exact",
    seed: int = 0,
) -> IndexCase:
    """`lens`: first and last position + 1 of each request's tokens in the step. Unseen slots hold NaN bytes.

    `weights`: "exact" multiples of 1/2, whose MXFP4 scores are exact in fp32 in any order; "negative"; "random".
    `repeat_keys`: only that many different keys, so that scores tie.
    """
    g = torch.Generator().manual_seed(seed)
    inputs = index_inputs(lens, CSA_RATIO, key_format, index_keys.hadamard, repeat_keys, heads, g)
    tokens = len(inputs["q"])
    draw = torch.randint(-2, 3, (tokens, heads), generator=g) / 2
    if weights == "negative":
        draw = -draw.abs() - 0.5
    elif weights == "random":
        draw = torch.randn(tokens, heads, generator=g) * 0.011
    inputs["q"] = inputs["q"].to(q_dtype)
    return IndexCase(**inputs, weights=draw.float(), key_format=key_format, top=top)


def assert_selects(out: Tensor, case: IndexCase, exact: bool, query: Tensor | None = None) -> None:
    """`exact`: the rows of the reference, else a right choice up to rounding of the scores. Says what differs.

    `query` [T, Hi, 128]: what the device made of the queries. A token for which it rounded another way than the
    reference is judged by it.
    """
    got, expected = out.cpu(), case.expected()
    tokens = (got != expected).any(1).nonzero().flatten().tolist()
    for t in tokens:
        n, request = int(case.visible[t]), int(case.token_request[t])
        differs = (got[t] != expected[t]).nonzero().flatten().tolist()
        detail = (
            f"token {t}, request {request}, position {int(case.positions[t])}, visible {n}, top {case.top}: "
            f"{len(differs)} places differ, from {differs[:5]}; tokens that differ {tokens[:20]}"
        )
        assert n > case.top, detail
        table = case.block_table[request].long()
        entry_of_row = {int(table[i // 32]) * 32 + i % 32: i for i in range(n)}
        entries = [entry_of_row.get(int(r), -1) for r in got[t]]
        assert -1 not in entries, f"{detail}; unseen rows: {entries[:20]}"
        assert entries == sorted(set(entries)), f"{detail}; entries are not in ascending order: {entries[:20]}"
        scores = case.scores(t, query)
        threshold = scores.sort(descending=True).values[case.top - 1]
        slack = 1e-5 * scores.abs().max()
        chosen = torch.zeros(n, dtype=torch.bool)
        chosen[entries] = True
        lost = ((scores > threshold + slack) & ~chosen).nonzero().flatten().tolist()
        wrong = ((scores < threshold - slack) & chosen).nonzero().flatten().tolist()
        assert not lost and not wrong, f"{detail}; missed {lost[:10]}, wrongly taken {wrong[:10]}"
        if exact:
            best = scores.sort(descending=True, stable=True).indices[: case.top].sort().values.tolist()
            assert query is not None and entries == best, f"{detail}; equal scores or rounding only"
