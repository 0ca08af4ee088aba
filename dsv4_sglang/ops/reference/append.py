"""`append`: all cache writes of a layer for the tokens of a step. `append_swa`: writes of final window entries.

A decode step has the same number of tokens of each request, one or a few drafts, and no `window`: append writes ring
and compressor states, and the attention kernels of the step then read the ring. A prefill step passes `window`: append
copies the ring's old entries and the chunk's entries to it and only then overwrites ring entries. The attention kernels
of the step read `window`, because the chunk's first queries still need entries that its last tokens overwrite in the
ring (SPEC 6.4). Compressed entries that are completed in the step are written in the step and visible to its attention
kernels.

After a decode step of several tokens a request may continue from any of them: rings and compressor states keep what
that needs (`model.geometry.state_rows`). To roll back tokens, begin the next step at a smaller length.
"""

import torch
from torch import Tensor

from dsv4_sglang.formats import KeyFormat, KVBuffer, KVFormat
from dsv4_sglang.formats.index_keys import INDEX_DIM, hadamard
from dsv4_sglang.formats.kv_entries import ENTRY_DIM
from dsv4_sglang.formats.quantise import quantise_e4m3
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
from dsv4_sglang.ops.reference.chunks import Chunk, check, check_step, make_chunks, token_positions, write_window
from dsv4_sglang.ops.rope import normalise_and_rotate, rounding
from dsv4_sglang.ops.schemas import NAMESPACE

NEG_INF = float("-inf")


def _csa_compressor_state(compressor_state: Tensor) -> CsaCompressorState:
    known = {rings.rows: rings for rings in CSA_COMPRESSOR_STATES}
    rings = known.get(compressor_state.shape[1])
    if rings is None:
        raise ValueError(
            f"append: compressor_state has {compressor_state.shape[1]} rows per slot; "
            f"for ratio 4 expected one of {sorted(known)}"
        )
    return rings


def _state_draft_tokens(ratio: int, compressor_state: Tensor | None) -> int:
    """Return the tokens per request that a decode step may write to a compressor state."""
    if ratio == 0 or compressor_state is None:
        return 1
    if ratio == CSA_RATIO:
        return _csa_compressor_state(compressor_state).draft_tokens
    rows = compressor_state.shape[1]
    check(
        "append",
        rows == HCA_RAW_ROWS or (rows > 0 and rows % HCA_ONLINE_ROWS == 0),
        f"compressor_state has {rows} rows per slot; for ratio 128 expected {HCA_RAW_ROWS} or a multiple of 3",
    )
    return 1 if rows == HCA_RAW_ROWS else max(1, rows // HCA_ONLINE_ROWS - 1)


def _pool(kz: Tensor) -> Tensor:
    """Return the per-channel softmax pooling of a window (SPEC 3.2, 3.3): k and z [2, rows, D] -> [D]."""
    k, z = kz
    return (z.softmax(0) * k).sum(0)


def _csa_pool(chunk: Chunk, score: Tensor, ape: Tensor, compressor_state: Tensor, tracked: Tensor | None) -> Tensor:
    """Pool the CSA windows that the chunk completes, then update the compressor state.

    A window pools eight rows: the previous stream of the window before it, and its own current stream.
    `compressor_state` [slots, rows, D] is that of one compressor.
    """
    dim, rings = compressor_state.shape[-1], _csa_compressor_state(compressor_state)
    current, previous = compressor_state.split([rings.previous_k, rings.rows - rings.previous_k], 1)
    positions = chunk.positions
    # [k_prev | k_cur | z_prev | z_cur] of each token -> [previous or current stream, k or z, token, dim].
    streams = score[chunk.begin : chunk.end].float().unflatten(-1, (2, 2, dim)).permute(2, 1, 0, 3).clone()
    streams[:, 1] += ape.float()[positions % CSA_RATIO].unflatten(-1, (2, dim)).transpose(0, 1)
    first = chunk.length // CSA_RATIO  # the open window at `length`
    # Arrange both streams from the first position that pooling reads. The previous stream is one window behind.
    start, stop = CSA_RATIO * (first - 1), chunk.length + chunk.count
    arranged = torch.zeros(2, 2, stop - start, dim)
    arranged[:, 1] = NEG_INF
    before, own = arranged
    # Older rows are dead: only seven rows of the previous stream and three of the open window are live.
    for kz, new, state, live in zip(arranged, streams, (previous, current), (2 * CSA_RATIO, CSA_RATIO)):
        ring = state[chunk.slot].unflatten(0, (2, -1))
        old = torch.arange(max(0, CSA_RATIO * (first + 1) - live), chunk.length)
        kz[:, old - start] = ring[:, old % ring.shape[1]]
        kz[:, positions - start] = new
        at, _ = chunk.latest(live)
        ring[:, at % ring.shape[1]] = new[:, -len(at) :]
    if tracked is not None:  # a snapshot ends at a multiple of 128, where only the last 4 previous rows are live
        at, rows = chunk.latest(chunk.own)
        due = (tracked[rows] >= 0) & (at % BLOCK_TOKENS >= BLOCK_TOKENS - CSA_RATIO)
        slots, at, new = tracked[rows][due].long(), at[due], streams[0][:, -chunk.own :][:, due]
        previous.unflatten(1, (2, -1))[slots, :, at % rings.previous] = new.transpose(0, 1)
    pooled = []
    for window in range((stop - chunk.own) // CSA_RATIO, stop // CSA_RATIO):
        begin = CSA_RATIO * window - start
        pooled.append(_pool(torch.cat([before[:, begin - CSA_RATIO : begin], own[:, begin : begin + CSA_RATIO]], 1)))
    return torch.stack(pooled) if pooled else arranged.new_empty(0, dim)


def _hca_pool(chunk: Chunk, score: Tensor, ape: Tensor, compressor_state: Tensor) -> Tensor:
    """Pool the HCA windows that the chunk completes, then update the compressor state.

    `compressor_state` is [slots, 256, D] raw, or [slots, 3 n, D] online with n copies; the state after t tokens is copy
    t mod n.
    """
    dim = compressor_state.shape[-1]
    k, z = score[chunk.begin : chunk.end].float().split(dim, -1)
    kz = torch.stack([k, z + ape.float()[chunk.positions % HCA_RATIO]])
    state = compressor_state[chunk.slot]
    pool = _hca_pool_raw if len(state) == HCA_RAW_ROWS else _hca_pool_online
    pooled = pool(chunk, kz, state)
    return torch.stack(pooled) if pooled else k.new_empty(0, dim)


def _hca_pool_raw(chunk: Chunk, kz: Tensor, state: Tensor) -> list[Tensor]:
    """Store k and z of the chunk's tokens in the raw state. Return the pooled completed windows, [D] each."""
    state = state.unflatten(0, (2, HCA_RATIO))
    open_rows = chunk.length % HCA_RATIO
    pooled, begin = [], 0
    while begin < chunk.count:
        end = min(chunk.count, begin + HCA_RATIO - open_rows)
        window = torch.cat([state[:, :open_rows], kz[:, begin:end]], 1)
        rows = window.shape[1]
        state[:, :rows] = window
        if rows == HCA_RATIO:
            pooled.append(_pool(window))
        open_rows, begin = 0, end
    return pooled


def _hca_pool_online(chunk: Chunk, kz: Tensor, state: Tensor) -> list[Tensor]:
    """Update the online state (maximum, sum, accumulator) by the chunk's tokens. Return the completed windows, [D]
    each.

    Tokens are added in runs of `chunk.own`: one by one in a decode step, so that a draft token gets the same bits as
    after steps of one token.
    """
    k, z = kz
    state_copies = state.unflatten(0, (-1, HCA_ONLINE_ROWS))
    empty = torch.stack([torch.full_like(k[0], NEG_INF), torch.zeros_like(k[0]), torch.zeros_like(k[0])])
    peak, total, acc = state_copies[chunk.length % len(state_copies)]
    pooled, begin = [], 0
    while begin < chunk.count:
        open_rows = (chunk.length + begin) % HCA_RATIO
        if open_rows == 0:
            peak, total, acc = empty
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
    if stop % HCA_RATIO:  # an empty state is not stored
        state_copies[stop % len(state_copies)] = torch.stack([peak, total, acc])
    return pooled


def _write_lengths(
    chunks: list[Chunk],
    ring_rows: int,
    ratio: int,
    swa_pos: Tensor | None,
    swa_head: Tensor | None,
    tail_len: Tensor | None,
) -> None:
    """Write the tables that follow from the lengths of the requests. Arguments as in `append`."""
    for chunk in chunks:
        stop, (at, _) = chunk.length + chunk.count, chunk.latest(WINDOW)
        if swa_pos is not None:
            swa_pos[chunk.slot, at % ring_rows] = at.to(swa_pos.dtype)
        if swa_head is not None:
            swa_head[chunk.slot] = stop % ring_rows
        if tail_len is not None and ratio:
            tail_len[chunk.slot] = stop % ratio


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
    staging_slots: Tensor | None,
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

    Without `window`, T must be a multiple of B: each request has the same number of tokens, at most the number that
    ring and compressor state have rows for (`model.geometry.state_rows`).

    On CUDA, a decode step that is recorded into a graph reads projections, batch tensors, weights and `rope` while the
    preceding kernel of the stream still runs: that kernel must not write them.

    Args:
        kv: [T, 512] bf16 or fp32. Its dtype determines the rounding between stages.
        kv_score: fp32, CSA [T, 2048] = [k_prev | k_cur | z_prev | z_cur], HCA [T, 1024] = [k | z].
        index_kv_score: fp32 [T, 512], CSA, as `kv_score` with 128 columns per group.
        kv_norm, entry_norm: [512] norm weights.
        index_norm: [128] norm weight.
        ape: fp32, CSA [4, 1024] = [prev | cur], HCA [128, 512].
        index_ape: fp32 [4, 256].
        rope: fp32 [positions, 64], interleaved cos and sin.
        eps: epsilon of the norms.
        ratio: 0 (SWA), 4 (CSA) or 128 (HCA).
        kv_format: code of the `KVFormat` of `ring`, `entries` and `window`.
        key_format: code of the `KeyFormat` of `index_keys`.
        slots: int32 [B], state slots; -1 skips the request.
        prefix_lens: int32 [B], tokens before the step.
        query_start: int32 [B + 1], first token of each request.
        token_request: int32 [T], request of each token.
        out_loc: int64 [T], pool slots, congruent to the positions modulo 128.
        staging_slots: int32 [T], staging slot of the snapshot that this token's window entry belongs to, or -1.
        ring: [slots, R, w], R at least 128; written, position t at index t % R.
        compressor_state: fp32, written. CSA [slots, rows, 640] with the rows of one of `CSA_COMPRESSOR_STATES`, HCA
            [slots, 256, 512] raw or [slots, 3 n, 512] online with n copies.
        entries: written, CSA [blocks, 32, w] at out_loc // 4, HCA [1, blocks, w] at out_loc // 128.
        index_keys: [blocks, 32, w], written at out_loc // 4.
        window: [1, T + 128 B, w], written in a prefill step.
        swa_pos: int32 [slots, R], written if given.
        swa_head: int32 [slots], written if given.
        tail_len: int32 [slots], written if given.

    Raises:
        ValueError: more tokens per request in a decode step than supported, or wrong shapes.
    """
    check("append", ratio in (0, CSA_RATIO, HCA_RATIO), f"ratio is {ratio}; expected 0, 4 or 128")
    tokens = kv.shape[0]
    check("append", out_loc.shape[0] == tokens, f"out_loc has {out_loc.shape[0]} slots for {tokens} tokens")
    state = compressor_state if ratio else None
    check_step("append", tokens, slots.shape[0], ring, window, state, _state_draft_tokens(ratio, state))
    round_stage = rounding(kv.dtype)
    positions = token_positions(prefix_lens, query_start, token_request)
    rows = normalise_and_rotate(kv, kv_norm, eps, positions, rope, round_stage)
    rings = KVBuffer(ring, KVFormat.from_code(kv_format))
    _write_lengths(make_chunks(slots, prefix_lens, query_start), ring.shape[1], ratio, swa_pos, swa_head, tail_len)
    for chunk in make_chunks(slots, prefix_lens, query_start, by_token=window is None):
        write_window(chunk, rows, rings, window, staging_slots)
        if ratio == 0:
            continue
        assert kv_score is not None and ape is not None and entry_norm is not None
        assert compressor_state is not None and entries is not None
        stop = chunk.length + chunk.count
        closed = torch.arange((stop - chunk.own) // ratio, stop // ratio)
        entry_indices = out_loc[chunk.begin + ratio * (closed + 1) - 1 - chunk.length] // ratio
        first = ratio * closed  # entries are rotated at the first token of their window (SPEC 3.4)
        if ratio == HCA_RATIO:
            pooled = _hca_pool(chunk, kv_score, ape, compressor_state)
        else:
            assert index_kv_score is not None and index_ape is not None
            assert index_norm is not None and index_keys is not None
            entry_state, index_state = compressor_state.split([ENTRY_DIM, INDEX_DIM], -1)
            pooled = _csa_pool(chunk, kv_score, ape, entry_state, staging_slots)
            keys = _csa_pool(chunk, index_kv_score, index_ape, index_state, staging_slots)
            keys = normalise_and_rotate(round_stage(keys), index_norm, eps, first, rope, round_stage)
            KVBuffer(index_keys, KeyFormat.from_code(key_format)).write(entry_indices, hadamard(keys))
        pooled = normalise_and_rotate(round_stage(pooled), entry_norm, eps, first, rope, round_stage)
        rings._replace(data=entries).write(entry_indices, pooled)


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
    """Quantise final window entries (normalised and rotated) into the window rings, FP8 entries only (SPEC 2.4).

    Tokens come in any number and order. Of tokens with the same ring index the one with the highest position is kept.

    Args:
        raw_kv: bf16 [T, 512].
        request_slots: int32 [T]; -1 skips the token.
        positions: int32 [T].
        swa_fp8: uint8 [slots, R, 448], view of the ring.
        swa_rope: bf16 [slots, R, 64], view of the ring.
        swa_inv: float8_e8m0fnu [slots, R], view of the ring, the multiplier that dequantises.
        swa_pos: int32 [slots, R].
        swa_head: int32 [slots], ring index of the next position.
        rope_dim: dims with RoPE.

    Raises:
        ValueError: `raw_kv` is not bf16, or the dims do not fit the rings.
    """
    if raw_kv.dtype != torch.bfloat16:
        raise ValueError(f"append_swa: raw_kv is {raw_kv.dtype}; expected torch.bfloat16")
    if rope_dim != swa_rope.shape[-1] or raw_kv.shape[-1] != swa_fp8.shape[-1] + rope_dim:
        raise ValueError(
            f"append_swa: rope_dim {rope_dim} and rows of {raw_kv.shape[-1]} do not fit rings of "
            f"{swa_fp8.shape[-1]} FP8 and {swa_rope.shape[-1]} RoPE dims"
        )
    ring_rows = swa_fp8.shape[1]
    # Python dicts keep the last write, which is the highest position of each ring index.
    last, heads = {}, {}
    for at, slot, token in sorted(zip(positions.tolist(), request_slots.tolist(), range(len(positions)))):
        if slot >= 0:
            last[slot, at % ring_rows] = token
            heads[slot] = (at + 1) % ring_rows
    order = torch.tensor(list(last.values()), dtype=torch.long)
    slots, at = request_slots[order].long(), positions[order].long()
    row = at % ring_rows
    nope = raw_kv.shape[-1] - rope_dim
    swa_fp8[slots, row], exponents = quantise_e4m3(raw_kv[order, :nope])
    swa_rope[slots, row] = raw_kv[order, nope:]
    # The view has one of the eight exponent bytes. FlashMLA reads one per tile, so all of them are written.
    repeat = swa_inv.stride(1) if swa_inv.stride(1) > 0 else 1
    strip = swa_inv.view(torch.uint8).as_strided((*swa_inv.shape, repeat), (*swa_inv.stride(), 1))
    strip[slots, row] = exponents.unsqueeze(-1).expand(-1, repeat)
    swa_pos[slots, row] = at.to(swa_pos.dtype)
    for slot, head in heads.items():
        swa_head[slot] = head


torch.library.impl(f"{NAMESPACE}::append", "CPU", append)
torch.library.impl(f"{NAMESPACE}::append_swa", "CPU", append_swa)
