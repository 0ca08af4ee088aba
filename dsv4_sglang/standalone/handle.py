"""`LayerCacheHandle`: one layer of the cache during one forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_sglang.cache.append import LayerTables, LayerWeights, Projections, append_layer
from dsv4_sglang.formats import make_kv_buffers
from dsv4_sglang.model.geometry import BLOCK_TOKENS
from dsv4_sglang.model.layer_schedule import AttentionType
from dsv4_sglang.standalone.paged_cache import PagedKVPool
from dsv4_sglang.standalone.schema import LayerCacheSchema
from dsv4_sglang.standalone.state_cache import StateCachePool
from dsv4_sglang.standalone.step import Step


@dataclass(frozen=True)
class SwaView:
    """Window rings of a layer, and the window of each token of the step as `attend` takes it.

    Attributes:
        window: buffer that `window_indices` refer to, the ring (decode) or the step's workspace (prefill). In a prefill
            step None until `append` has filled the workspace, because the ring does not keep the entries of all tokens.
        window_indices: [T, 128] int32, None without `window`.
        window_lens: [T] int32, number of valid indices; None without `window`.
        kv_format: code of the KV format of window and compressed entries, as `attend` takes it.
        positions: [T] int64.
        swa_fp8: [slots, R, 448] uint8; None in unquantised formats.
        swa_rope: [slots, R, 64] bf16; None in unquantised formats.
        swa_inv: [slots, R] float8_e8m0fnu; None in unquantised formats.
        swa_pos: [slots, R] int32, position of every ring entry, -1 for none.
        swa_head: [slots] int32, ring index of the next position.
    """

    window: Tensor | None
    window_indices: Tensor | None
    window_lens: Tensor | None
    kv_format: int
    positions: Tensor
    swa_fp8: Tensor | None
    swa_rope: Tensor | None
    swa_inv: Tensor | None
    swa_pos: Tensor
    swa_head: Tensor


@dataclass(frozen=True)
class ClassicalView:
    """The compressed entries of a CSA or HCA layer.

    Attributes:
        entries: buffer of the entries.
        entries_fp8: [blocks, 32 or 1, 448] uint8; None in unquantised formats.
        entries_rope: [blocks, 32 or 1, 64] bf16; None in unquantised formats.
        inv_scale: [blocks, 32 or 1] float8_e8m0fnu; None in unquantised formats.
        block_table: [B, blocks] int32, block ids of each request of the step, then -1.
        n_visible: [T] int32, entries that each token may see.
        entry_indices: [T, blocks] int32, indices of an HCA layer's entries, which reads all visible ones. None in a CSA
            layer, whose indices come from `index_topk`.
    """

    entries: Tensor
    entries_fp8: Tensor | None
    entries_rope: Tensor | None
    inv_scale: Tensor | None
    block_table: Tensor
    n_visible: Tensor
    entry_indices: Tensor | None


@dataclass(frozen=True)
class IndexerView:
    """The index keys of a CSA layer, and the other cache arguments of `index_topk`.

    Attributes:
        index_keys: buffer of the keys.
        indexer_keys_fp4: [blocks, 32, 64] uint8; None for unquantised keys.
        indexer_scales: [blocks, 32, 8] float8_e4m3fn; None for unquantised keys.
        block_table: [B, blocks] int32, block ids of each request of the step, then -1.
        token_request: [T] int32, request of each token.
        positions: [T] int64.
        key_format: code of the format of the keys, as `index_topk` takes it.
        n_visible: [T] int32, keys that each token may see.
    """

    index_keys: Tensor
    indexer_keys_fp4: Tensor | None
    indexer_scales: Tensor | None
    block_table: Tensor
    token_request: Tensor
    positions: Tensor
    key_format: int
    n_visible: Tensor


class LayerCacheHandle:
    """Writes and reads of one layer for the tokens of one step. Constructing it allocates nothing on the device.

    In a prefill step (not `Step.is_decode`) `append` allocates a workspace of window entries, which `read_swa_view`
    returns: later tokens of the chunk overwrite ring entries that its earlier tokens still see (SPEC 6.4).

    All methods of a decode step can be captured into a CUDA graph and replayed at other positions. Sizes follow from
    shapes; positions, slots and blocks are read on the device at every replay. See `Step`.

    Attributes:
        layer_idx: id of the layer.
        state: window rings and compressor states of the layer.
        paged: entries and index keys of the layer, None in an SWA layer.
        step: the tokens.
    """

    def __init__(self, layer_idx: int, state: StateCachePool, paged: PagedKVPool | None, step: Step) -> None:
        self.layer_idx = layer_idx
        self.state = state
        self.paged = paged
        self.step = step
        self._window: Tensor | None = None

    @property
    def schema(self) -> LayerCacheSchema:
        return self.state.schema

    def __str__(self) -> str:
        return f"layer {self.layer_idx} ({self.schema.attn.name})"

    def write_swa(self, raw_kv: Tensor) -> None:
        """Write final window entries (normalised and rotated) [T, 512] bf16 to the rings. FP8 rings only.

        There may be more tokens than a ring holds: the last R of a request are kept (R: entries of its ring, at least
        128). Compressors are not updated.

        Raises:
            ValueError: the KV format is not FP8.
        """
        pool = self.state
        if pool.swa_fp8 is None or pool.swa_rope is None or pool.swa_inv is None:
            raise ValueError(
                f"write_swa, {self}: supports FP8 entries only, the KV format is {self.schema.kv_format.value}; use "
                "append()"
            )
        torch.ops.dsv4_sglang.append_swa(
            raw_kv,
            self.step.request_slots.int(),
            self.step.positions.int(),
            pool.swa_fp8,
            pool.swa_rope,
            pool.swa_inv,
            pool.swa_pos,
            pool.swa_head,
            self.schema.rope_dim,
        )

    def append(
        self,
        kv: Tensor,
        weights: LayerWeights,
        kv_score: Tensor | None = None,
        index_kv_score: Tensor | None = None,
    ) -> None:
        """Write all cache contents that the layer keeps of the step's tokens, from the raw projections.

        Args:
            kv, kv_score, index_kv_score: see `Projections`.
            weights: weights of the layer.

        Raises:
            ValueError: an input is missing or has a wrong shape, or a request must not be written (`Step`), for
                instance because the step does not begin where its tokens end. Nothing is written.
        """
        self._check_append(kv, weights, kv_score, index_kv_score)
        pool, paged, step = self.state, self.paged, self.step.begin_append(self.layer_idx)
        if not step.is_decode:
            self._window = make_kv_buffers(1, 1, step.window_size, self.schema.kv_format, kv.device)[0]
        tables = LayerTables(
            pool.ring,
            pool.compressor_state,
            paged.entries if paged else None,
            paged.index_keys if paged else None,
            pool.swa_pos,
            pool.swa_head,
            pool.tail_len,
        )
        append_layer(self.schema, tables, weights, Projections(kv, kv_score, index_kv_score), step, self._window)
        self.step.end_append(self.layer_idx, step.slots)

    def _check_append(
        self, kv: Tensor, weights: LayerWeights, kv_score: Tensor | None, index_kv_score: Tensor | None
    ) -> None:
        """Raise ValueError unless all inputs of the layer's kind are present, with the step's number of tokens."""
        tokens, dim, index_dim = self.step.positions.shape[0], self.schema.entry_head_dim, self.schema.indexer_head_dim
        streams = {AttentionType.SWA: 0, AttentionType.CSA: 4, AttentionType.HCA: 2}[self.schema.attn]
        for name, tensor, columns in (
            ("kv", kv, dim),
            ("kv_score", kv_score, streams * dim),
            ("index_kv_score", index_kv_score, streams * index_dim),
        ):
            given = tuple(tensor.shape) if tensor is not None else None
            wanted = (tokens, columns) if columns else None
            if given != wanted:
                raise ValueError(f"append, {self}: {name} has shape {given}; expected {wanted}")
        for name, columns in (
            ("entry_norm", streams),
            ("ape", streams),
            ("index_norm", index_dim),
            ("index_ape", index_dim),
        ):
            if columns and getattr(weights, name) is None:
                raise ValueError(f"append, {self}: weights.{name} is None")
        # The kernels read the table at positions that only the device knows.
        positions, needed = weights.rope.shape[0], self.step.requests.block_tables.shape[1] * BLOCK_TOKENS
        if positions < needed:
            raise ValueError(
                f"append, {self}: weights.rope has {positions} positions; expected at least {needed}, as many as the "
                "blocks of a request have tokens"
            )

    def read_swa_view(self) -> SwaView:
        """Return the window of every token of the step. Call after `append` or `write_swa`."""
        pool, step = self.state, self.step
        window = pool.ring if step.is_decode else self._window
        return SwaView(
            window=window,
            window_indices=step.metadata.window_indices if window is not None else None,
            window_lens=step.metadata.window_lens if window is not None else None,
            kv_format=self.schema.kv_format.code,
            positions=step.metadata.positions,
            swa_fp8=pool.swa_fp8,
            swa_rope=pool.swa_rope,
            swa_inv=pool.swa_inv,
            swa_pos=pool.swa_pos,
            swa_head=pool.swa_head,
        )

    def read_classical_view(self) -> ClassicalView | None:
        """Return the compressed entries, None in an SWA layer."""
        if self.paged is None:
            return None
        step, is_hca = self.step.metadata, self.schema.attn is AttentionType.HCA
        return ClassicalView(
            entries=self.paged.entries,
            entries_fp8=self.paged.entries_fp8,
            entries_rope=self.paged.entries_rope,
            inv_scale=self.paged.inv_scale,
            block_table=step.block_table,
            n_visible=step.entry_lens[self.schema.ratio],
            entry_indices=step.block_table[step.token_request.long()] if is_hca else None,
        )

    def read_indexer_view(self) -> IndexerView | None:
        """Return the index keys, None in a layer without an indexer."""
        if self.paged is None or self.paged.index_keys is None:
            return None
        step = self.step.metadata
        return IndexerView(
            index_keys=self.paged.index_keys,
            indexer_keys_fp4=self.paged.indexer_keys_fp4,
            indexer_scales=self.paged.indexer_scales,
            block_table=step.block_table,
            token_request=step.token_request,
            positions=step.positions,
            key_format=self.schema.key_format.code,
            n_visible=step.entry_lens[self.schema.ratio],
        )
