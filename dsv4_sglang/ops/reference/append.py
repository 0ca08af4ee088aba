"""`append`: everything a layer writes for the tokens of a step, and `append_swa`: window rows that are already final.

Who reads what when. A decode step has the same number of tokens of each request, one or a few drafts, and no
`window`: append writes ring and compressor states, attention kernels of the step read the ring afterwards. A prefill
step passes `window`: append copies the ring's old rows and the chunk's rows there and only then replaces ring rows;
attention kernels of the step read `window`, because the chunk's early queries still need rows that its late tokens
replace in the ring (SPEC 6.4). Entries whose window of tokens closes in the step are written in the step and visible to
its attention kernels.

Behind a decode step of several tokens a request may go on from any of them: rings and compressor states keep what that
needs (`model.geometry.state_rows`), so that taking tokens back is to begin the next step at a smaller length.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4_sglang.formats import KeyFormat, KeyTable, KVBuffer, KVFormat
from dsv4_sglang.formats.index_keys import INDEX_DIM, hadamard
from dsv4_sglang.formats.kv_entries import ENTRY_DIM, quantise_nope
from dsv4_sglang.model.geometry import (
    BLOCK_TOKENS,
    CSA_COMPRESSOR_STATES,
    CSA_RATIO,
    HCA_ONLINE_ROWS,
    HCA_RATIO,
    HCA_RAW_ROWS,
    WINDOW,
    CsaCompressorState,
)
from dsv4_sglang.ops.rope import rms_norm, rotate, rounding
from dsv4_sglang.ops.schemas import NAMESPACE

NEG_INF = float("-inf")


@dataclass(frozen=True)
class _Chunk:
    """Tokens of one request in the step: rows `begin..end` of the inputs, positions `length..length + count`. The last
    `own` of them write, the others are read."""

    request: int
    slot: int
    begin: int
    end: int
    length: int
    own: int

    @property
    def count(self) -> int:
        return self.end - self.begin

    @property
    def positions(self) -> Tensor:
        return torch.arange(self.length, self.length + self.count)

    def latest(self, keep: int) -> tuple[Tensor, slice]:
        """Positions of the last `keep` tokens of those that write, and where their inputs are."""
        kept = min(keep, self.own)
        return self.positions[self.count - kept :], slice(self.end - kept, self.end)


def _chunks(slots: Tensor, prefix_lens: Tensor, query_start: Tensor, decode: bool) -> list[_Chunk]:
    """One a request. In a decode step one a token, as the device has a block for each: all go on from the state before
    the step, in any order. Here the last token is first, which asks most of rings and compressor states."""
    starts, lengths = query_start.tolist(), prefix_lens.tolist()
    requests = [
        _Chunk(b, slot, starts[b], starts[b + 1], lengths[b], own=starts[b + 1] - starts[b])
        for b, slot in enumerate(slots.tolist())
        if slot >= 0 and starts[b + 1] > starts[b]
    ]
    if not decode:
        return requests
    return [replace(chunk, end=end, own=1) for chunk in requests for end in range(chunk.end, chunk.begin, -1)]


def _check(ok: bool, message: Callable[[], str]) -> None:
    if not ok:
        raise ValueError("append: " + message())


def _csa_compressor_state(compressor_state: Tensor) -> CsaCompressorState:
    known = {rings.rows: rings for rings in CSA_COMPRESSOR_STATES}
    rings = known.get(compressor_state.shape[1])
    if rings is None:
        raise ValueError(
            f"append: compressor_state has {compressor_state.shape[1]} rows a slot; "
            f"for ratio 4 expected one of {sorted(known)}"
        )
    return rings


def _hca_draft_tokens(compressor_state: Tensor) -> int:
    """Tokens of a request that a decode step may write into an HCA compressor state."""
    rows = compressor_state.shape[1]
    _check(
        rows == HCA_RAW_ROWS or (rows > 0 and rows % HCA_ONLINE_ROWS == 0),
        lambda: f"compressor state has {rows} rows a slot; for ratio 128 expected {HCA_RAW_ROWS} or a multiple of 3",
    )
    return 1 if rows == HCA_RAW_ROWS else max(1, rows // HCA_ONLINE_ROWS - 1)


def _check_decode(
    tokens: int, requests: int, ring: Tensor, compressor_state: Tensor | None, tail_draft_tokens: int
) -> None:
    """`tail_draft_tokens`: tokens of a request that `compressor_state` is made for."""
    each, rest = divmod(tokens, max(requests, 1))
    _check(
        rest == 0,
        lambda: (
            f"{tokens} tokens for {requests} requests without `window`; expected as many of each. A step with "
            "chunks needs `window`"
        ),
    )
    _check_rows("ring", each, ring, ring.shape[1] - WINDOW + 1)
    if compressor_state is not None:
        _check_rows("compressor_state", each, compressor_state, tail_draft_tokens)


def _check_rows(name: str, each: int, table: Tensor, most: int) -> None:
    _check(
        each <= most,
        lambda: (
            f"{each} tokens of each request without `window`, but {name} has {table.shape[1]} rows a slot, for at "
            f"most {most}. A cache for more is made with draft_tokens {each}"
        ),
    )


def _write_window(chunk: _Chunk, rows: Tensor, ring: KVBuffer, window: KVBuffer | None, track: Tensor | None) -> None:
    slot, length, ring_rows = chunk.slot, chunk.length, ring.data.shape[1]
    if window is not None:
        base = chunk.begin + WINDOW * chunk.request + WINDOW
        old = torch.arange(max(0, length - WINDOW), length)
        window.copy_from(ring, slot * ring_rows + old % ring_rows, base + old - length)
        window.write(base + torch.arange(chunk.count), rows[chunk.begin : chunk.end])
    positions, at = chunk.latest(WINDOW)
    ring.write(slot * ring_rows + positions % ring_rows, rows[at])
    if track is not None:
        positions, at = chunk.latest(chunk.own)
        tracked = track[at] >= 0
        ring.write(track[at][tracked].long() * ring_rows + positions[tracked] % ring_rows, rows[at][tracked])


def _pool(z: Tensor, k: Tensor) -> Tensor:
    """Per-channel softmax over the rows of each window: z, k [windows, rows, D] -> [windows, D] (SPEC 3.2, 3.3)."""
    return (z.softmax(1) * k).sum(1)


def _csa_pool(
    chunk: _Chunk,
    score: Tensor,
    ape: Tensor,
    compressor_state: Tensor,
    rings: CsaCompressorState,
    tracked: Tensor | None,
) -> Tensor:
    """Pool the CSA windows that the chunk closes, then move the compressor states on. `compressor_state` [slots, rows,
    D] of one compressor."""
    dim = compressor_state.shape[-1]
    positions = chunk.positions
    k_prev, k_cur, z_prev, z_cur = score[chunk.begin : chunk.end].float().split(dim, -1)
    bias = ape.float()[positions % CSA_RATIO]
    z_prev, z_cur = z_prev + bias[:, :dim], z_cur + bias[:, dim:]
    state = compressor_state[chunk.slot]
    first = chunk.length // CSA_RATIO  # the window that is open at `length`
    # Lay previous and current streams out from position 4 (first - 1), the first row that pooling can touch.
    start = CSA_RATIO * (first - 1)
    stop = chunk.length + chunk.count
    k_p, k_c = torch.zeros(stop - start, dim), torch.zeros(stop - start, dim)
    z_p, z_c = torch.full((stop - start, dim), NEG_INF), torch.full((stop - start, dim), NEG_INF)
    old = torch.arange(max(0, start), chunk.length)
    k_p[old - start], z_p[old - start] = (
        state[rings.previous_k + old % rings.previous],
        state[rings.previous_z + old % rings.previous],
    )
    old = torch.arange(CSA_RATIO * first, chunk.length)
    k_c[old - start], z_c[old - start] = state[old % rings.current], state[rings.current_z + old % rings.current]
    new = positions - start
    k_p[new], z_p[new], k_c[new], z_c[new] = k_prev, z_prev, k_cur, z_cur

    closed = torch.arange((stop - chunk.own) // CSA_RATIO, stop // CSA_RATIO) - first
    windows = CSA_RATIO * closed[:, None] + torch.arange(CSA_RATIO)
    pooled = _pool(
        torch.cat([z_p[windows], z_c[windows + CSA_RATIO]], 1), torch.cat([k_p[windows], k_c[windows + CSA_RATIO]], 1)
    )

    # Behind them no more than three rows of the open window are alive, and seven of the previous stream.
    at, rows = chunk.latest(CSA_RATIO)
    at, rows = at % rings.current, slice(rows.start - chunk.begin, None)
    state[at], state[rings.current_z + at] = k_cur[rows], z_cur[rows]
    at, rows = chunk.latest(2 * CSA_RATIO)
    at, rows = at % rings.previous, slice(rows.start - chunk.begin, None)
    state[rings.previous_k + at], state[rings.previous_z + at] = k_prev[rows], z_prev[rows]
    if tracked is not None:  # a snapshot ends at a multiple of 128: only its last 4 previous-window rows live on
        at, rows = chunk.latest(chunk.own)
        last = torch.nonzero((tracked[rows] >= 0) & (at % BLOCK_TOKENS >= BLOCK_TOKENS - CSA_RATIO)).squeeze(-1)
        target, at = tracked[rows][last].long(), at[last] % rings.previous
        last += rows.start - chunk.begin
        compressor_state[target, rings.previous_k + at], compressor_state[target, rings.previous_z + at] = (
            k_prev[last],
            z_prev[last],
        )
    return pooled


def _hca_pool(chunk: _Chunk, score: Tensor, ape: Tensor, compressor_state: Tensor) -> Tensor:
    """Pool the HCA windows that the chunk closes, then move the compressor state on. `compressor_state` [slots, 256, D]
    raw, [slots, 3 n, D] online with n state copies, that of the state after t tokens being t mod n."""
    dim = compressor_state.shape[-1]
    k, z = score[chunk.begin : chunk.end].float().split(dim, -1)
    z = z + ape.float()[chunk.positions % HCA_RATIO]
    state = compressor_state[chunk.slot]
    pool = _hca_pool_raw if len(state) == HCA_RAW_ROWS else _hca_pool_online
    pooled = pool(chunk, k, z, state)
    return torch.stack(pooled) if pooled else k.new_empty(0, dim)


def _hca_pool_raw(chunk: _Chunk, k: Tensor, z: Tensor, state: Tensor) -> list[Tensor]:
    open_rows = chunk.length % HCA_RATIO
    pooled, begin = [], 0
    while begin < chunk.count:
        end = min(chunk.count, begin + HCA_RATIO - open_rows)
        k_w = torch.cat([state[:open_rows], k[begin:end]])
        z_w = torch.cat([state[HCA_RATIO : HCA_RATIO + open_rows], z[begin:end]])
        state[: len(k_w)], state[HCA_RATIO : HCA_RATIO + len(z_w)] = k_w, z_w
        if len(k_w) == HCA_RATIO:
            pooled.append(_pool(z_w[None], k_w[None])[0])
        open_rows, begin = 0, end
    return pooled


def _hca_pool_online(chunk: _Chunk, k: Tensor, z: Tensor, state: Tensor) -> list[Tensor]:
    """Rows are added in runs of the tokens that write, that is in a decode step one by one: a token behind others of
    its step then has the bits that it has behind steps of one token."""
    dim = k.shape[-1]
    state_copies = state.unflatten(0, (-1, HCA_ONLINE_ROWS))
    peak, total, acc = state_copies[chunk.length % len(state_copies)]
    pooled, begin = [], 0
    while begin < chunk.count:
        open_rows = (chunk.length + begin) % HCA_RATIO
        if open_rows == 0:
            peak, total, acc = k.new_full((dim,), NEG_INF), k.new_zeros(dim), k.new_zeros(dim)
        end = min(chunk.count, begin + chunk.own, begin + HCA_RATIO - open_rows)
        new_peak = torch.maximum(peak, z[begin:end].amax(0))
        weight, keep = (z[begin:end] - new_peak).exp(), (peak - new_peak).exp()
        total = total * keep + weight.sum(0)
        acc = acc * keep + (weight * k[begin:end]).sum(0)
        peak = new_peak
        if open_rows + end - begin == HCA_RATIO and end > chunk.count - chunk.own:
            pooled.append(acc / total)
        begin = end
    stop = chunk.length + chunk.count
    if stop % HCA_RATIO:  # an empty state has no bytes
        state_copies[stop % len(state_copies)] = torch.stack([peak, total, acc])
    return pooled


def append(
    kv: Tensor,
    kv_score: Tensor | None,
    index_kv_score: Tensor | None,
    kv_norm: Tensor,
    entry_norm: Tensor | None,
    index_norm: Tensor | None,
    ape: Tensor | None,
    index_ape: Tensor | None,
    rope: Tensor,
    eps: float,
    ratio: int,
    kv_format: int,
    key_format: int,
    slots: Tensor,
    prefix_lens: Tensor,
    query_start: Tensor,
    token_request: Tensor,
    out_loc: Tensor,
    track_slots: Tensor | None,
    ring: Tensor,
    compressor_state: Tensor | None,
    entries: Tensor | None,
    index_keys: Tensor | None,
    window: Tensor | None,
    swa_pos: Tensor | None,
    swa_head: Tensor | None,
    tail_len: Tensor | None,
) -> None:
    """Write one layer's cache for T tokens of B requests, from the raw projections (SPEC 2.1, 2.4, 2.5, 3.1 to 3.7).

    Projections: `kv` [T, 512] bf16 or fp32 (its dtype sets the rounding between stages); `kv_score` fp32, CSA [T, 2048]
    = [k_prev | k_cur | z_prev | z_cur], HCA [T, 1024] = [k | z]; `index_kv_score` [T, 512] fp32 like CSA's with 128 a
    column group. Weights: `kv_norm`, `entry_norm` [512], `index_norm` [128], `ape` fp32 [4, 1024] = [prev | cur] or
    [128, 512], `index_ape` [4, 256]; `rope` [positions, 64] fp32, interleaved cos and sin. `ratio` 0 (SWA), 4 (CSA) or
    128 (HCA). Formats: `kv_format` of `ring`, `entries` and `window`, `key_format` of `index_keys`, the codes of
    `KVFormat` and `KeyFormat`. Batch: `slots` [B] int32 state slots, -1 skips the request; `prefix_lens` [B] int32
    tokens before the step; `query_start` [B + 1] int32; `token_request` [T] int32; `out_loc` [T] int64 pool slots,
    congruent to the positions modulo 128; `track_slots` [T] int32, the state slot of the snapshot that this token's
    row belongs to, or -1. Written: `ring` [slots, R, w], R at least 128, position t in row t % R; `compressor_state`
    fp32, CSA [slots, rows, 640], rows as one of `CSA_COMPRESSOR_STATES` has, HCA [slots, 256, 512] raw or [slots, 3 n,
    512] online, n state copies; `entries` (CSA [blocks, 32, w] at out_loc // 4, HCA [1, blocks, w] at out_loc // 128);
    `index_keys` [blocks, 32, w]; `window` [1, T + 128 B, w] (prefill); `swa_pos` [slots, R], `swa_head` [slots],
    `tail_len` [slots] int32 where given.

    Without `window`, T is a multiple of B: each request has as many tokens, at most those that the rows of ring and
    compressor state are for (`model.geometry.state_rows`). ValueError for more.

    On CUDA, a decode step that is recorded into a graph reads batch, weights and `rope` while the kernel before it in
    the stream still runs: that kernel must not write them.
    """
    _check(ratio in (0, CSA_RATIO, HCA_RATIO), lambda: f"ratio is {ratio}; expected 0, 4 or 128")
    rings, keys = KVBuffer(ring, KVFormat.from_code(kv_format)), KeyFormat.from_code(key_format)
    _check(ring.shape[1] >= WINDOW, lambda: f"ring has {ring.shape[1]} rows a slot; expected at least {WINDOW}")
    csa, most = CSA_COMPRESSOR_STATES[0], 1
    if ratio == CSA_RATIO:
        assert compressor_state is not None
        csa = _csa_compressor_state(compressor_state)
        most = csa.draft_tokens
    elif ratio == HCA_RATIO:
        assert compressor_state is not None
        most = _hca_draft_tokens(compressor_state)
    tokens = kv.shape[0]
    _check(out_loc.shape[0] == tokens, lambda: f"out_loc has {out_loc.shape[0]} slots for {tokens} tokens")
    if window is None:
        _check_decode(tokens, slots.shape[0], ring, compressor_state if ratio else None, most)
    round_stage = rounding(kv.dtype)
    positions = (
        prefix_lens.long()[token_request.long()] + torch.arange(tokens) - query_start.long()[token_request.long()]
    )
    rows = round_stage(rotate(round_stage(rms_norm(kv, kv_norm, eps)), positions, rope))

    def finish(pooled: Tensor, norm: Tensor, first: int) -> Tensor:
        """Pooled entries `first`, `first + 1`, ... -> normalised, rotated at the first token of their window (SPEC
        3.4)."""
        at = ratio * (first + torch.arange(pooled.shape[0]))
        return round_stage(rotate(round_stage(rms_norm(round_stage(pooled), norm, eps)), at, rope))

    for chunk in _chunks(slots, prefix_lens, query_start, decode=window is None):
        _write_window(chunk, rows, rings, rings._replace(data=window) if window is not None else None, track_slots)
        stop = chunk.length + chunk.count
        if swa_pos is not None:
            at, _ = chunk.latest(WINDOW)
            swa_pos[chunk.slot, at % ring.shape[1]] = at.to(swa_pos.dtype)
        is_last = chunk.end == query_start[chunk.request + 1]
        if swa_head is not None and is_last:
            swa_head[chunk.slot] = stop % ring.shape[1]
        if ratio == 0:
            continue
        if tail_len is not None and is_last:
            tail_len[chunk.slot] = stop % ratio
        assert kv_score is not None and ape is not None and entry_norm is not None
        assert compressor_state is not None and entries is not None
        first = (stop - chunk.own) // ratio
        closing = ratio * (torch.arange(first, stop // ratio) + 1) - 1  # the token that closes each window
        entry_rows = out_loc[chunk.begin + closing - chunk.length] // ratio
        entry_table = rings._replace(data=entries)
        if ratio == HCA_RATIO:
            pooled = _hca_pool(chunk, kv_score, ape, compressor_state)
            entry_table.write(entry_rows, finish(pooled, entry_norm, first))
            continue
        assert (
            index_kv_score is not None and index_ape is not None and index_norm is not None and index_keys is not None
        )
        pooled = _csa_pool(chunk, kv_score, ape, compressor_state[..., :ENTRY_DIM], csa, track_slots)
        entry_table.write(entry_rows, finish(pooled, entry_norm, first))
        pooled = _csa_pool(chunk, index_kv_score, index_ape, compressor_state[..., ENTRY_DIM:], csa, track_slots)
        assert pooled.shape[-1] == INDEX_DIM
        KeyTable(index_keys, keys).write(entry_rows, hadamard(finish(pooled, index_norm, first)))


def append_swa(
    raw_kv: Tensor,
    request_slots: Tensor,
    positions: Tensor,
    swa_fp8: Tensor,
    swa_rope: Tensor,
    swa_inv: Tensor,
    swa_pos: Tensor,
    swa_head: Tensor,
    rope_dim: int,
) -> None:
    """Quantise final rows (normalised and rotated) into the window rings, FP8 rows only (SPEC 2.4).

    `raw_kv` [T, 512] bf16, `request_slots` [T] int32 (-1 skips the token), `positions` [T] int32; the ring as split
    views: `swa_fp8` [slots, R, 448] uint8, `swa_rope` [slots, R, 64] bf16, `swa_inv` [slots, R] float8_e8m0fnu
    (the multiplier that dequantises), `swa_pos` [slots, R] int32, `swa_head` [slots] int32 (the ring row that the
    next position takes). Tokens come in any number and order: of those that fall on one ring row the highest position
    stays.
    """
    if raw_kv.dtype != torch.bfloat16:
        raise ValueError(f"append_swa: raw_kv is {raw_kv.dtype}; expected torch.bfloat16")
    if rope_dim != swa_rope.shape[-1] or raw_kv.shape[-1] != swa_fp8.shape[-1] + rope_dim:
        raise ValueError(
            f"append_swa: rope_dim {rope_dim} and rows of {raw_kv.shape[-1]} do not fit rings of "
            f"{swa_fp8.shape[-1]} FP8 and {swa_rope.shape[-1]} RoPE dims"
        )
    ring_rows = swa_fp8.shape[1]
    valid = torch.nonzero(request_slots >= 0).squeeze(-1)
    order = valid[torch.argsort(positions[valid], stable=True)]
    slots, at = request_slots[order].long(), positions[order].long()
    # Python dicts keep the last write: the highest position of each ring row.
    last = {key: i for i, key in enumerate(zip(slots.tolist(), (at % ring_rows).tolist()))}
    keep = torch.tensor(list(last.values()), dtype=torch.long)
    order, slots, at = order[keep], slots[keep], at[keep]
    row = at % ring_rows
    nope = raw_kv.shape[-1] - rope_dim
    codes, exponents = quantise_nope(raw_kv[order, :nope].float())
    swa_fp8[slots, row] = codes
    swa_rope[slots, row] = raw_kv[order, nope:]
    # The view shows one exponent byte of the strip's eight; FlashMLA reads one a tile, so all of them are written.
    repeat = swa_inv.stride(1) if swa_inv.stride(1) > 0 else 1
    strip = swa_inv.view(torch.uint8).as_strided((*swa_inv.shape, repeat), (*swa_inv.stride(), 1))
    strip[slots, row] = exponents.unsqueeze(-1).expand(-1, repeat)
    swa_pos[slots, row] = at.to(swa_pos.dtype)
    for slot in set(slots.tolist()):
        swa_head[slot] = (int(at[slots == slot].max()) + 1) % ring_rows


torch.library.impl(f"{NAMESPACE}::append", "CPU", append)
torch.library.impl(f"{NAMESPACE}::append_swa", "CPU", append_swa)
