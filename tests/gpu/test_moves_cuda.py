"""The ops that move data on CUDA: exact copies, no other writes. ops/test_moves.py tests what copy_state rejects."""

import pytest
import torch
from support.kernel_cases import DEVICE, ops, printed, recorded, strided_copy
from torch import Tensor

pytestmark = pytest.mark.gpu


def random_bytes(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def device(t: Tensor) -> Tensor:
    return t.clone().to(DEVICE)


def state(layers: int = 3, slots: int = 9) -> list[Tensor]:
    """Return tables of every alignment: rings with padding after each slot, compressor states, heads, odd bytes."""
    return [
        random_bytes(layers, slots, 128 * 584 + 64)[..., : 128 * 584],
        torch.randn(layers, slots, 24, 640),
        torch.randn(layers, slots, 3, 512),
        torch.arange(layers * slots, dtype=torch.int32).view(layers, slots),
        torch.arange(slots, dtype=torch.int32).view(1, slots),
        random_bytes(2, slots, 37, seed=5),
        torch.randn(layers, slots, 0),
    ]


def many_tensors() -> list[Tensor]:
    """Return more tensors than one launch takes."""
    return [torch.randn(1, 4, i + 1) for i in range(70)]


@pytest.mark.parametrize(
    "make, src, dst",
    [
        (state, [1], [2]),
        (state, [0, 3, -1, 4, 5], [8, 7, 2, -1, 6]),
        (state, [], []),
        (state, [-1], [-1]),
        (many_tensors, [1, 2], [3, 0]),
    ],
)
def test_copy_state(make, src, dst):
    expected = make()
    got = [strided_copy(t) for t in expected]
    pairs = torch.tensor(src, dtype=torch.int32), torch.tensor(dst, dtype=torch.int32)
    torch.ops.dsv4_sglang.copy_state(*pairs, expected)
    ops().copy_state(*(device(t) for t in pairs), got)
    for i, (g, e) in enumerate(zip(got, expected)):
        assert torch.equal(g.cpu(), e), f"tensor {i}"


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("columns, tokens", [(9, 1030), (2048, 262_144), (64, 262_144)])
def test_gather_tables(columns, tokens, dtype):
    """Few and many columns, padding, fewer columns than blocks, ids beyond a length."""
    requests = torch.tensor([3, 1, 4, 0, 2, 0], dtype=dtype)
    seq_lens = torch.tensor([1, 128, 129, 0, tokens, 1000], dtype=dtype)
    req_to_token = (
        torch.randint(0, 90, (5, tokens), generator=torch.Generator().manual_seed(0), dtype=torch.int32) * 128
    )
    tables = requests, seq_lens, torch.tensor([0, 7, 5, 6, 2], dtype=torch.int32), req_to_token
    expected = [torch.full((8,), -9, dtype=torch.int32), torch.full((8, columns), -9, dtype=torch.int32)]
    got = [device(t) for t in expected]
    torch.ops.dsv4_sglang.gather_tables(*tables, *expected)
    ops().gather_tables(*(device(t) for t in tables), *got)
    for g, e in zip(got, expected):
        assert torch.equal(g.cpu(), e)
    with pytest.raises(RuntimeError, match="gather_tables: 6 requests; expected at most 5"):
        ops().gather_tables(*(device(t) for t in tables), got[0][:5], got[1])


def test_copy_state_in_a_graph():
    expected = state()
    got = [strided_copy(t) for t in expected]
    src, dst = (torch.full((2,), -1, dtype=torch.int32, device=DEVICE) for _ in range(2))
    graph, _ = recorded(lambda: torch.ops.dsv4_sglang.copy_state(src, dst, got))
    src.copy_(torch.tensor([4, 1])), dst.copy_(torch.tensor([2, 3]))
    graph.replay()
    torch.ops.dsv4_sglang.copy_state(src.cpu(), dst.cpu(), expected)
    assert all(torch.equal(g.cpu(), e) for g, e in zip(got, expected))


def pools(blocks: int) -> list[Tensor]:
    """Return CSA entries, index keys, the two strips of an HCA table, and padded blocks."""
    made = [
        random_bytes(blocks, 32, 584, seed=1),
        random_bytes(blocks, 2304, seed=2),
        random_bytes(blocks, 576, seed=3),
        random_bytes(blocks, 8, seed=4),
        random_bytes(blocks, 112, seed=5)[:, :100],
    ]
    return [strided_copy(t) for t in made]


BYTES = 32 * 584 + 2304 + 576 + 8 + 100
# Byte offsets of the tensors of `pools` in a host row: contiguous, in a different order.
OFFSETS = [576 + 2304, 576, 0, 576 + 2304 + 32 * 584, 584 + 2304 + 32 * 584]
SCATTERED = torch.Generator().manual_seed(0)
IDS = {
    "one run": (torch.arange(3, 603), torch.arange(20, 620)),
    "scattered": (torch.randperm(700, generator=SCATTERED)[:40], torch.randperm(710, generator=SCATTERED)[:40]),
    "none": (torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long)),
}


@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize("pattern", IDS)
@pytest.mark.parametrize("staged", [True, False])
def test_swap_blocks(pattern, to_host, staged):
    """To and from pinned memory, and to and from a buffer on the GPU; all pools, and all but the first."""
    gpu, host = pools(700), random_bytes(710, BYTES, seed=50)
    blocks, rows = IDS[pattern]
    there = device(host.clone()) if staged else host.clone().pin_memory()
    for part in (slice(None), slice(1, None)):
        expected_gpu, expected_host = [t.cpu() for t in gpu], there.cpu().clone()
        torch.ops.dsv4_sglang.swap_blocks(expected_gpu[part], expected_host, blocks, rows, to_host, OFFSETS[part])
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        on_device = device(blocks)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            ops().swap_blocks(gpu[part], there, on_device, rows, to_host, OFFSETS[part])
        stream.synchronize()
        assert torch.equal(there.cpu(), expected_host)
        for i, (g, e) in enumerate(zip(gpu, expected_gpu)):
            assert torch.equal(g.cpu(), e), f"pool {i}"


def test_swap_blocks_of_more_than_a_launch_holds():
    gpu = [device(random_bytes(3000, 48, seed=i)) for i in range(130)]
    host = torch.zeros(3000, 130 * 48, dtype=torch.uint8).pin_memory()
    g = torch.Generator().manual_seed(2)
    blocks, rows = torch.randperm(3000, generator=g)[:2100], torch.randperm(3000, generator=g)[:2100]
    ops().swap_blocks(gpu, host, device(blocks), rows, True, list(range(0, 130 * 48, 48)))
    torch.cuda.synchronize()
    for i, d in enumerate(gpu):
        assert torch.equal(host[rows][:, 48 * i : 48 * i + 48], d.cpu()[blocks]), f"pool {i}"
    assert int((host != 0).any(1).sum()) <= 2100


@pytest.mark.parametrize(
    "blocks, rows, moved, message",
    [
        ([0, 1], [0, -1], 0, r"host row -1 is not in 0\.\.69"),
        ([0, 1], [0, 70], 0, r"host row 70 is not in 0\.\.69"),
        ([5, 6], [7, 7], 0, "host row 7 is listed twice"),
        ([5], [7], 8, rf"bytes {BYTES - 92}\.\.{BYTES + 8} are not within host rows of {BYTES} bytes"),
        ([5], [7], -1, r"bytes -1\.\.575 are not within host rows of"),
        ([5], [7, 8], 0, "blocks is"),
    ],
)
def test_swap_blocks_checks_before_it_moves(blocks, rows, moved, message):
    gpu, host = pools(60), random_bytes(70, BYTES).pin_memory()
    before = [t.clone().cpu() for t in (*gpu, host)]
    with pytest.raises(RuntimeError, match=message):
        offsets = [offset + moved for offset in OFFSETS]
        ops().swap_blocks(gpu, host, device(torch.tensor(blocks)), torch.tensor(rows), True, offsets)
    with pytest.raises(RuntimeError, match=r"host is Byte .* pageable"):
        ops().swap_blocks(gpu, random_bytes(70, BYTES), device(torch.tensor([0])), torch.tensor([1]), True, OFFSETS)
    torch.cuda.synchronize()
    assert all(torch.equal(t.cpu(), b) for t, b in zip((*gpu, host), before))


def test_swap_blocks_skips_missing_blocks(capfd):
    gpu, host = pools(60), torch.zeros(70, BYTES, dtype=torch.uint8).pin_memory()
    ops().swap_blocks(gpu, host, device(torch.tensor([3, 60, -1])), torch.tensor([0, 1, 2]), True, OFFSETS)
    assert "swap_blocks: block 60 is not in 0..59" in printed(capfd)
    assert host[0].any() and not host[1:].any()
