"""`BlockAllocator` against a reference count of owners."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4_sglang.standalone import BlockAllocator


def test_order_of_blocks(device: torch.device) -> None:
    """The first blocks come first, then the most recently released ones."""
    allocator = BlockAllocator(10, device)
    ids = allocator.acquire(5)
    assert ids.tolist() == [0, 1, 2, 3, 4]
    assert (ids.dtype, ids.device.type, allocator.num_free) == (torch.int32, device.type, 5)
    allocator.release(ids[1:3])
    assert allocator.acquire(3).tolist() == [2, 1, 5]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([8], r"block 8 is not in 0\.\.7"),
        ([0, -1], r"block -1 is not in 0\.\.7"),
        ([0, 5], "block 5 is already free"),
        ([1, 2, 1], "block 1 is listed twice"),
        ([0.0], "expected ints of shape"),
        ([[0]], "expected ints of shape"),
    ],
)
@pytest.mark.parametrize("call", ["share", "release"])
def test_bad_ids_change_nothing(device: torch.device, call: str, ids: list, message: str) -> None:
    allocator = BlockAllocator(8, device)
    allocator.acquire(4)
    for given_ids in (ids, torch.tensor(ids, device=device)):
        with pytest.raises(ValueError, match=f"{call}: .*{message}"):
            getattr(allocator, call)(given_ids)
    assert [allocator.owners(block) for block in range(8)] == [1] * 4 + [0] * 4
    assert sorted(allocator.acquire_ids(4)) == [4, 5, 6, 7]


def test_negative_numbers() -> None:
    with pytest.raises(ValueError, match="num_total_blocks is -1"):
        BlockAllocator(-1, "cpu")
    with pytest.raises(ValueError, match="-1 blocks"):
        BlockAllocator(1, "cpu").acquire(-1)


CALLS = st.lists(
    st.tuples(st.sampled_from(["acquire", "share", "release"]), st.integers(0, 8), st.randoms()), max_size=40
)


@given(st.integers(0, 20), CALLS)
def test_any_order_of_calls(total: int, calls: list) -> None:
    """After any sequence of calls, a block has owners or is free, never both."""
    allocator = BlockAllocator(total, "cpu")
    owners: Counter[int] = Counter()
    for call, n, rng in calls:
        if call == "acquire" and n > total - len(owners):
            with pytest.raises(RuntimeError, match=f"OOM: {n} blocks requested, {allocator.num_free} free of {total}"):
                allocator.acquire(n)
        elif call == "acquire":
            ids = allocator.acquire(n).tolist()
            assert len(set(ids)) == n and not set(ids) & set(owners)
            owners.update(ids)
        else:
            chosen = rng.sample(sorted(owners), min(n, len(owners)))
            getattr(allocator, call)(torch.tensor(chosen, dtype=torch.int64) if rng.random() < 0.5 else chosen)
            owners = owners + Counter(chosen) if call == "share" else owners - Counter(chosen)
        assert allocator.num_free == total - len(owners)
        assert all(allocator.owners(block) == owners[block] for block in range(total))
    assert sorted([*owners, *allocator.acquire(allocator.num_free).tolist()]) == list(range(total))


@pytest.mark.gpu
def test_a_capture_is_rejected_and_goes_on() -> None:
    """A graph would return the same ids in every replay."""
    allocator = BlockAllocator(8)
    ids = allocator.acquire(3)
    counter = torch.zeros(1, device=allocator.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counter.add_(1)
        BlockAllocator(1, "cpu").acquire(1)  # a graph does not capture CPU work
        with pytest.raises(RuntimeError, match=r"acquire: .* captured into a CUDA graph"):
            allocator.acquire(1)
        with pytest.raises(RuntimeError, match=r"release: .* captured into a CUDA graph"):
            allocator.release(ids)
    graph.replay()
    assert int(counter) == 1, "the rejections left the capture intact"
    assert allocator.num_free == 5


@pytest.mark.gpu
def test_no_wait_for_the_device() -> None:
    allocator = BlockAllocator(64)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ids = allocator.acquire(8)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert ids.tolist() == list(range(8))
