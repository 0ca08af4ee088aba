"""Tests of `PagedKVPool`, `StateCachePool` and their views: shapes, bytes, and shared memory."""

import itertools

import pytest
import torch
from torch import Tensor

from dsv4_sglang.cache import CacheLayout, StateStorage
from dsv4_sglang.formats import KeyFormat, KVBuffer, KVFormat, kv_entries, quantise
from dsv4_sglang.model import AttentionType, DSV4Config, build_schedule
from dsv4_sglang.standalone import LayerCacheSchema, PagedKVPool, StateCachePool, build_schema

CSA, HCA, SWA = AttentionType.CSA, AttentionType.HCA, AttentionType.SWA
FLASH = DSV4Config.flash()
SPECS = {spec.attn: spec for spec in build_schedule(FLASH)}
COMPRESSOR_STATES = ["tail_ka", "tail_za", "tail_kb", "tail_zb"]
INDEX_COMPRESSOR_STATES = [f"index_{name}" for name in COMPRESSOR_STATES]
ONLINE = ["tail_max", "tail_sum", "tail_acc"]


def schema(kind: AttentionType, **options: str) -> LayerCacheSchema:
    return build_schema(FLASH, SPECS[kind], **options)


def values(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def dequantised(fp8: Tensor, rope: Tensor, inv_scale: Tensor) -> Tensor:
    """Dequantise through the split views, as a user does."""
    return torch.cat([fp8.view(torch.float8_e4m3fn).float() * inv_scale.float()[..., None], rope.float()], -1)


@pytest.mark.parametrize(("kind", "per_block"), [(CSA, 32), (HCA, 1)])
def test_entry_views(device: torch.device, kind: AttentionType, per_block: int) -> None:
    """Rows written through the table are read in place through the split views."""
    pool = PagedKVPool(schema(kind), 5, device)
    assert (kind is CSA) == (pool.index_keys is not None) == (pool.indexer_keys_fp4 is not None)
    assert pool.entries.shape == ((5, 32, 584) if kind is CSA else (1, 5, 584))
    assert pool.entries_fp8.shape == (5, per_block, 448)
    assert pool.entries_rope.shape == (5, per_block, 64)
    assert pool.inv_scale.shape == (5, per_block)
    dtypes = (pool.entries_fp8.dtype, pool.entries_rope.dtype, pool.inv_scale.dtype)
    assert dtypes == (torch.uint8, torch.bfloat16, torch.float8_e8m0fnu)

    n = 5 * per_block
    data = values(n, 512).to(device) * torch.logspace(-3, 3, n).to(device)[:, None]
    KVBuffer(pool.entries, KVFormat.FP8).write(torch.arange(n, device=device), data)
    read = dequantised(pool.entries_fp8, pool.entries_rope, pool.inv_scale).view(n, 512)
    assert torch.equal(read, KVBuffer(pool.entries, KVFormat.FP8).read(torch.arange(n, device=device)))
    assert torch.equal(read[:, 448:], data[:, 448:].bfloat16().float())
    assert ((read - data).norm(dim=-1) / data.norm(dim=-1)).max() < 0.036


def test_rows_do_not_overlap() -> None:
    """Each byte of a block belongs to one row: data starts at n * 576, exponents follow all data (FlashMLA's
    layout)."""
    pool = PagedKVPool(schema(CSA), 2, "cpu")
    block = torch.arange(2)[:, None] * 32 * 584
    row = torch.arange(32)
    base = pool.entries.data_ptr()
    for b, r in itertools.product(range(2), range(32)):
        assert pool.entries_fp8[b, r].data_ptr() - base == block[b] + 576 * row[r]
        assert pool.entries_rope[b, r].data_ptr() - base == block[b] + 576 * row[r] + 448
        assert pool.inv_scale[b, r].data_ptr() - base == block[b] + 32 * 576 + 8 * row[r]
    flat = PagedKVPool(schema(HCA), 7, "cpu")
    assert [flat.entries_fp8[b].data_ptr() - flat.entries.data_ptr() for b in range(7)] == [576 * b for b in range(7)]
    assert flat.inv_scale.data_ptr() - flat.entries.data_ptr() == 7 * 576
    assert all(flat.entries_fp8[b].data_ptr() % 16 == 0 for b in range(7))


def test_key_views(device: torch.device) -> None:
    pool = PagedKVPool(schema(CSA), 3, device)
    assert pool.index_keys.shape == (3, 32, 72)
    assert (pool.indexer_keys_fp4.shape, pool.indexer_keys_fp4.dtype) == ((3, 32, 64), torch.uint8)
    assert (pool.indexer_scales.shape, pool.indexer_scales.dtype) == ((3, 32, 8), torch.float8_e4m3fn)
    data, at = values(96, 128).to(device), torch.arange(96, device=device)
    table = KVBuffer(pool.index_keys, KeyFormat.MXFP4)
    table.write(at, data)
    packed, scales = pool.indexer_keys_fp4.reshape(-1, 64), pool.indexer_scales.reshape(-1, 8).view(torch.uint8)
    read = quantise.dequantise_fp4(packed, scales)
    assert torch.equal(read, table.read(at))
    assert (read - data).norm() / data.norm() < 0.13


def test_unquantised_pool_has_no_split_views() -> None:
    pool = PagedKVPool(schema(CSA, kv_format="bf16", key_format="fp32"), 2, "cpu")
    assert (pool.entries.shape, pool.entries.dtype) == ((2, 32, 512), torch.bfloat16)
    assert (pool.index_keys.shape, pool.index_keys.dtype) == ((2, 32, 128), torch.float32)
    views = ("entries_fp8", "entries_rope", "inv_scale", "indexer_keys_fp4", "indexer_scales")
    assert [getattr(pool, name) for name in views] == [None] * 5
    state = StateCachePool(schema(SWA, kv_format="fp32"), 3, "cpu")
    assert (state.ring.shape, state.ring.dtype) == ((3, 128, 512), torch.float32)
    assert [state.swa_fp8, state.swa_rope, state.swa_inv] == [None] * 3


def test_swa_has_no_paged_pool() -> None:
    with pytest.raises(ValueError, match="SWA layer has no compressed entries"):
        PagedKVPool(schema(SWA), 2, "cpu")
    with pytest.raises(ValueError, match="num_blocks is 0"):
        PagedKVPool(schema(CSA), 0, "cpu")


def test_block_padding_only_on_sm100(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    for capability, expected in (((8, 0), 18688), ((9, 0), 18688), ((10, 0), 19008), ((12, 0), 18688)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device, c=capability: c)
        assert kv_entries.block_stride_bytes(32, KVFormat.FP8, cuda) == expected
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (10, 3))
    assert kv_entries.block_stride_bytes(128, KVFormat.FP8, cuda) == 74880
    assert kv_entries.block_stride_bytes(32, KVFormat.BF16, cuda) == 32 * 1024
    assert kv_entries.block_stride_bytes(32, KVFormat.FP8, torch.device("cpu")) == 18688


def test_padded_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With padding between blocks the views address the right rows, and the padding counts as memory."""
    monkeypatch.setattr(kv_entries, "block_stride_bytes", lambda n, fmt, _: -(-n * fmt.row_bytes // 576) * 576)
    pool, state = PagedKVPool(schema(CSA), 3, "cpu"), StateCachePool(schema(SWA), 3, "cpu")
    assert pool.memory_bytes() == 3 * (19008 + 32 * 72)
    assert state.memory_bytes() == 3 * 74880
    for table, fp8, rope, inv in (
        (pool.entries, pool.entries_fp8, pool.entries_rope, pool.inv_scale),
        (state.ring, state.swa_fp8, state.swa_rope, state.swa_inv),
    ):
        n = table.shape[0] * table.shape[1]
        KVBuffer(table, KVFormat.FP8).write(torch.arange(n), values(n, 512))
        assert torch.equal(
            dequantised(fp8, rope, inv).view(n, 512), KVBuffer(table, KVFormat.FP8).read(torch.arange(n))
        )
    state.copy_slot(0, 2)
    assert torch.equal(state.swa_fp8[2], state.swa_fp8[0])
    assert torch.equal(state.swa_inv[2].view(torch.uint8), state.swa_inv[0].view(torch.uint8))
    assert not torch.equal(state.swa_fp8[1], state.swa_fp8[0])


SHAPES = {
    (CSA, "raw"): {
        **dict.fromkeys(COMPRESSOR_STATES[:2], (4, 512)),
        **dict.fromkeys(COMPRESSOR_STATES[2:], (8, 512)),
        **dict.fromkeys(INDEX_COMPRESSOR_STATES[:2], (4, 128)),
        **dict.fromkeys(INDEX_COMPRESSOR_STATES[2:], (8, 128)),
    },
    (HCA, "raw"): dict.fromkeys(COMPRESSOR_STATES[:2], (128, 512)),
    (HCA, "online"): dict.fromkeys(ONLINE, (512,)),
    (SWA, "raw"): {},
}


@pytest.mark.parametrize(("kind", "form"), SHAPES)
def test_state_views(kind: AttentionType, form: str) -> None:
    pool = StateCachePool(schema(kind, hca_state=form), 3, "cpu")
    assert (pool.swa_fp8.shape, pool.swa_rope.shape, pool.swa_inv.shape) == ((3, 128, 448), (3, 128, 64), (3, 128))
    assert (pool.swa_pos.shape, pool.swa_head.shape) == ((3, 128), (3,))
    assert (pool.tail_len is None) == (kind is SWA)
    views = {name: getattr(pool, name) for name in COMPRESSOR_STATES + INDEX_COMPRESSOR_STATES + ONLINE}
    shapes = {name: view.shape[1:] for name, view in views.items() if view is not None}
    assert shapes == SHAPES[kind, form]
    # Together the views cover the compressor state exactly once.
    for number, name in enumerate(shapes):
        views[name].fill_(number + 1.0)
    if pool.compressor_state is not None:
        assert int((pool.compressor_state == 0).sum()) == 0
        assert sum(views[name].numel() for name in shapes) == pool.compressor_state.numel()


def test_csa_compressor_state_rows() -> None:
    """The ops use 4 rows of current k, 4 of current z, 8 of previous k and 8 of previous z."""
    pool = StateCachePool(schema(CSA), 1, "cpu")
    pool.compressor_state.copy_(torch.arange(24.0)[None, :, None].expand(1, 24, 640))
    pool.compressor_state[..., 512:] += 100
    first = [getattr(pool, name)[0, 0, 0].item() for name in COMPRESSOR_STATES + INDEX_COMPRESSOR_STATES]
    assert first == [0, 4, 8, 16, 100, 104, 108, 116]


def test_layers_of_a_storage() -> None:
    """Layers of one kind share a tensor, in their order."""
    storage = StateStorage(CacheLayout(tuple(schema(kind) for kind in (SWA, CSA, HCA, CSA)), torch.device("cpu")), 3)
    assert storage.rings.shape == (4, 3, 128, 584)
    assert storage.compressor_states[CSA].shape == (2, 3, 24, 640)
    assert storage.compressor_states[HCA].shape == (1, 3, 256, 512)
    for layer in range(4):
        for tensor in (storage.ring(layer), storage.compressor_state(layer)):
            if tensor is not None:
                tensor.fill_(layer + 1)
    assert storage.rings[:, 0, 0, 0].tolist() == [1, 2, 3, 4]
    assert storage.compressor_states[CSA][:, 1, 5, 600].tolist() == [2.0, 4.0]
    assert storage.compressor_states[HCA][:, 1, 200, 300].tolist() == [3.0]


@pytest.mark.parametrize("kind", [SWA, CSA, HCA])
def test_reset_and_copy_of_a_slot(device: torch.device, kind: AttentionType) -> None:
    pool = StateCachePool(schema(kind, hca_state="online"), 4, device)
    assert len(pool.tensors) == (3 if kind is SWA else 5)
    for tensor in pool.tensors:
        for slot in range(4):
            tensor[slot] = slot + 1
    pool.copy_slot(1, 3)
    pool.reset_slot(1)
    for tensor in pool.tensors:
        empty = -1 if tensor is pool.swa_pos else 0
        for slot, value in enumerate((1, empty, 3, 2)):
            assert bool((tensor[slot] == value).all())


def test_bad_storage() -> None:
    with pytest.raises(ValueError, match="0 state slots"):
        StateCachePool(schema(SWA), 0, "cpu")
    with pytest.raises(ValueError, match="no layers"):
        CacheLayout((), torch.device("cpu"))


@pytest.mark.parametrize("slot", [-1, 4])
def test_a_slot_that_does_not_exist(slot: int) -> None:
    """No slot changes. A negative number would count from the end."""
    pool = StateCachePool(schema(CSA), 4, "cpu")
    for tensor in pool.tensors:
        tensor.fill_(7)
    for call in (
        lambda: pool.reset_slot(slot),
        lambda: pool.copy_slot(slot, 0),
        lambda: pool.copy_slot(0, slot),
    ):
        with pytest.raises(ValueError, match=rf"slot {slot} does not exist; expected 0\.\.3"):
            call()
    assert all(bool((tensor == 7).all()) for tensor in pool.tensors)
