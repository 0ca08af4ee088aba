"""`BlockAllocator` against a set of the allocated blocks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4_sglang.cache.free_list import FreeList
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
def test_bad_ids_change_nothing(device: torch.device, ids: list, message: str) -> None:
    allocator = BlockAllocator(8, device)
    allocator.acquire(4)
    for given_ids in (ids, torch.tensor(ids, device=device)):
        with pytest.raises(ValueError, match=f"release: .*{message}"):
            allocator.release(given_ids)
    assert allocator.num_free == 4 and allocator.acquire_ids(4) == [4, 5, 6, 7]


def test_free_list_rejects_ids_not_allocated() -> None:
    """A list may begin at any number. Snapshot slots use one that begins at 1."""
    ids = FreeList(3, first=1)
    assert ids.take(2) == [1, 2] and ids.take(2) is None and ids.available == 1 and ids.free() == [3]
    for wrong in (0, 3, 4):
        with pytest.raises(ValueError, match=f"{wrong} is freed, but it is not allocated"):
            ids.give_back([wrong])
    ids.give_back([1])
    assert ids.take(2) == [1, 3]
    with pytest.raises(ValueError, match="2 is freed"):
        ids.give_back([2, 2])


def test_negative_numbers() -> None:
    with pytest.raises(ValueError, match="num_total_blocks is -1"):
        BlockAllocator(-1, "cpu")
    with pytest.raises(ValueError, match="-1 blocks"):
        BlockAllocator(1, "cpu").acquire(-1)


CALLS = st.lists(st.tuples(st.sampled_from(["acquire", "release"]), st.integers(0, 8), st.randoms()), max_size=40)


@given(st.integers(0, 20), CALLS)
def test_any_order_of_calls(total: int, calls: list) -> None:
    """After any sequence of calls, a block is allocated or free, never both. The last released block comes first."""
    allocator = BlockAllocator(total, "cpu")
    free = list(range(total))[::-1]
    owned: list[int] = []
    for call, n, rng in calls:
        if call == "acquire" and n > len(free):
            with pytest.raises(RuntimeError, match=f"OOM: {n} blocks requested, {len(free)} free of {total}"):
                allocator.acquire(n)
        elif call == "acquire":
            expected = [free.pop() for _ in range(n)]
            assert allocator.acquire(n).tolist() == expected
            owned += expected
        else:
            chosen = rng.sample(owned, min(n, len(owned)))
            allocator.release(torch.tensor(chosen, dtype=torch.int64) if rng.random() < 0.5 else chosen)
            owned = [block for block in owned if block not in chosen]
            free += chosen
        assert allocator.num_free == len(free)
    assert sorted([*owned, *allocator.acquire(allocator.num_free).tolist()]) == list(range(total))


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
