"""`append_v41` and `append_v41_keys`: cache writes of a DeepSeek-V4.1 layer for the tokens of a step (SPEC 11.3, 11.4).

They are two ops, because index keys are the product of the compressor's latents and a matrix, which is computed between
them. As with `append`, attention reads the ring in a decode step and the `window` workspace in a prefill step.
"""

import torch
from torch import Tensor

from dsv4_sglang.formats import KeyFormat, KVBuffer, KVFormat
from dsv4_sglang.formats.kv_entries import ENTRY_DIM
from dsv4_sglang.model.v41 import V41_RATIOS, pair_draft_tokens
from dsv4_sglang.ops.reference.chunks import check, check_step, make_chunks, token_positions, write_window
from dsv4_sglang.ops.rope import normalise_and_rotate, rms_norm, rotate, rounding
from dsv4_sglang.ops.schemas import NAMESPACE

_round = rounding(torch.bfloat16)


def append_v41(
    kv: Tensor,
    kv_score: Tensor | None,
    kv_norm: Tensor,
    entry_norm: Tensor | None,
    rope: Tensor,
    eps: float,
    ratio: int,
    slots: Tensor,
    prefix_lens: Tensor,
    query_start: Tensor,
    token_request: Tensor,
    out_loc: Tensor,
    staging_slots: Tensor | None,
    ring: Tensor,
    compressor_state: Tensor | None,
    entries: Tensor | None,
    latents: Tensor | None,
    window: Tensor | None,
) -> None:
    """Write window entries of T tokens of B requests, and the compressed entries of a layer that owns some (SPEC 11.3,
    11.4).

    Without `window`, T must be a multiple of B: each request has the same number of tokens, at most the number that
    ring and compressor state have rows for.

    Args:
        kv: bf16 [T, 512], raw projection.
        kv_score: raw projection, at ratio 1 bf16 [T, 512], at ratio 2 fp32 [T, 1024] = [k | score].
        kv_norm, entry_norm: [512] norm weights, bf16 or fp32.
        rope: fp32 [positions, 64], interleaved cos and sin.
        eps: epsilon of the norms.
        ratio: tokens per entry that the layer writes, 1 or 2; 0 if it writes none.
        slots, prefix_lens, query_start, token_request, out_loc, staging_slots: as in `append`.
        ring: uint8 [slots, R, 528], R at least 128; written, position t at index t % R.
        compressor_state: fp32 [slots, rows, 1024] at ratio 2, with `model.v41.pair_rows` rows; written.
        entries: uint8 [blocks, 128 / ratio, 288], written at out_loc // ratio.
        latents: bf16 [T, 512], written in the rows of tokens that complete an entry; normalised and not rotated.
        window: uint8 [1, T + 128 B, 528], written in a prefill step.

    Raises:
        ValueError: more tokens per request in a decode step than supported, a `window` or `ring` of a wrong size, or an
            unknown ratio.
    """
    check("append_v41", ratio in V41_RATIOS, f"ratio is {ratio}; expected 0, 1 or 2")
    state = compressor_state if ratio == 2 else None
    most = 0 if state is None else pair_draft_tokens(state.shape[1])
    check_step("append_v41", kv.shape[0], slots.shape[0], ring, window, state, most)
    positions = token_positions(prefix_lens, query_start, token_request)
    rows = normalise_and_rotate(kv, kv_norm, eps, positions, rope, _round)
    rings = KVBuffer(ring, KVFormat.MXFP8)
    for chunk in make_chunks(slots, prefix_lens, query_start):
        write_window(chunk, rows, rings, window, staging_slots)
        if ratio == 0:
            continue
        assert kv_score is not None and entry_norm is not None and entries is not None and latents is not None
        here = torch.arange(chunk.begin, chunk.end)
        closing = here[(positions[here] + 1) % ratio == 0]
        if ratio == 1:
            pooled = kv_score[here].float()
        else:
            assert compressor_state is not None
            waiting = compressor_state[chunk.slot]
            pooled = _round(_pool_pairs(kv_score[here], positions[here], waiting, decode=window is None))
        finished = _round(rms_norm(pooled, entry_norm, eps))
        latents[closing] = finished.bfloat16()
        rotated = _round(rotate(finished, positions[closing] + 1 - ratio, rope))
        KVBuffer(entries, KVFormat.NVFP4).write(out_loc[closing] // ratio, rotated)


def _pool_pairs(step: Tensor, at: Tensor, compressor_state: Tensor, decode: bool) -> Tensor:
    """Return [completed pairs, 512] fp32: per channel the mean of a pair's k, weighted by the softmax of its scores.

    Also updates the compressor state: with the token that waits after the step or, if tokens may be rolled back, with
    every token that has waited in it.

    Args:
        step: [n, 1024], tokens of one request.
        at: [n], their positions.
        compressor_state: [rows, 1024] of the request.
        decode: tokens may be rolled back.
    """
    paired = step
    if at[0] % 2:
        paired = torch.cat([compressor_state[at[0] // 2 % len(compressor_state)].clone()[None], step])
    waiting = at % 2 == 0
    if not decode:
        waiting[:-1] = False
    compressor_state[at[waiting] // 2 % len(compressor_state)] = step[waiting]
    k, score = paired[: len(paired) // 2 * 2].unflatten(0, (-1, 2)).split(ENTRY_DIM, -1)
    return (k * score.softmax(1)).sum(1)


def append_v41_keys(
    keys: Tensor,
    index_norm: Tensor,
    rope: Tensor,
    eps: float,
    ratio: int,
    slots: Tensor,
    prefix_lens: Tensor,
    query_start: Tensor,
    token_request: Tensor,
    out_loc: Tensor,
    index_keys: Tensor,
) -> None:
    """Write the index keys of the entries that a step completes (SPEC 11.4).

    Args:
        keys: bf16 [T, 128], the latents that `append_v41` wrote, multiplied by the indexer's matrix. Only rows of
            tokens that complete an entry are read.
        index_norm: [128] norm weight, bf16 or fp32.
        rope, eps, slots, prefix_lens, query_start, token_request, out_loc: as in `append_v41`.
        ratio: 1 or 2.
        index_keys: uint8 [blocks, 128 / ratio, 72], written at out_loc // ratio, MXFP4 in the NVFP4 container.

    Raises:
        ValueError: `ratio` is not 1 or 2.
    """
    check("append_v41", ratio in V41_RATIOS[1:], f"ratio is {ratio}; expected 1 or 2 for keys")
    positions = token_positions(prefix_lens, query_start, token_request)
    closing = (slots[token_request.long()] >= 0) & ((positions + 1) % ratio == 0)
    rotated = normalise_and_rotate(keys[closing], index_norm, eps, positions[closing] + 1 - ratio, rope, _round)
    KVBuffer(index_keys, KeyFormat.MXFP4).write(out_loc[closing] // ratio, rotated)


torch.library.impl(f"{NAMESPACE}::append_v41", "CPU", append_v41)
torch.library.impl(f"{NAMESPACE}::append_v41_keys", "CPU", append_v41_keys)
