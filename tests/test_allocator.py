"""`BlockAllocator` against a reference count of owners."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4_sglang.standalone import BlockAllocator


def test_order_of_blocks(device: torch.device) -> None:
    """The first blocks come first, then the most recently released ones. A request for more than is free takes
    nothing."""
    allocator = BlockAllocator(10, device)
    ids = allocator.acquire(5)
    assert ids.tolist() == [0, 1, 2, 3, 4]
    assert (ids.dtype, ids.device.type, allocator.num_free) == (torch.int32, device.type, 5)
    allocator.release(ids[1:3])
    with pytest.raises(RuntimeError, match=r"OOM: 8 blocks requested, 7 free of 10"):
        allocator.acquire(8)
    assert allocator.num_free == 7
    assert allocator.acquire(3).tolist() == [2, 1, 5]
    empty = allocator.acquire(0)
    assert (empty.shape, empty.dtype) == ((0,), torch.int32)
    allocator.release(empty)
    assert allocator.num_free == 4


def test_acquired_ids_outlive_later_releases(device: torch.device) -> None:
    """The ids are a copy: later releases overwrite the memory of the stack that they came from."""
    allocator = BlockAllocator(4, device)
    a, b = allocator.acquire(2), allocator.acquire(2)
    allocator.release(a)
    allocator.release(b)
    allocator.acquire(4)
    assert (a.tolist(), b.tolist()) == ([0, 1], [2, 3])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 1, 2, 3, 4], "5 blocks given, only 4 of 8 are allocated"),
        ([8], r"block 8 is not in 0\.\.7"),
        ([0, -1], r"block -1 is not in 0\.\.7"),
        ([0, 5], "block 5 is already free"),
        ([1, 2, 1], "block 1 is listed twice"),
    ],
)
@pytest.mark.parametrize("call", ["share", "release"])
def test_bad_ids_change_nothing(device: torch.device, call: str, ids: list[int], message: str) -> None:
    allocator = BlockAllocator(8, device)
    allocator.acquire(4)
    for given_ids in (ids, torch.tensor(ids, dtype=torch.int32, device=device)):
        with pytest.raises(ValueError, match=f"{call}: {message}"):
            getattr(allocator, call)(given_ids)
    assert [allocator.owners(block) for block in range(8)] == [1] * 4 + [0] * 4
    assert sorted(allocator.acquire(4).tolist()) == [4, 5, 6, 7]


@pytest.mark.parametrize("ids", [torch.tensor([0.0]), torch.tensor([True]), torch.tensor([[0]]), torch.tensor(0)])
def test_release_of_something_else(ids: torch.Tensor) -> None:
    allocator = BlockAllocator(2, "cpu")
    allocator.acquire(1)
    with pytest.raises(ValueError, match="expected ints of shape"):
        allocator.release(ids)
    assert allocator.num_free == 1


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
    """After any sequence of calls, a block has owners or is free, never both.

    The count and the errors follow from the owners.
    """
    allocator = BlockAllocator(total, "cpu")
    owners: Counter[int] = Counter()
    for call, n, rng in calls:
        if call == "acquire" and n > total - len(owners):
            with pytest.raises(RuntimeError, match="OOM"):
                allocator.acquire(n)
        elif call == "acquire":
            ids, host_ids = allocator.acquire_with_host_ids(n)
            assert ids.tolist() == host_ids
            assert len(set(host_ids)) == n
            assert not set(host_ids) & set(owners)
            assert all(0 <= i < total for i in host_ids)
            owners.update(host_ids)
        else:
            chosen = rng.sample(sorted(owners), min(n, len(owners)))
            given_ids = torch.tensor(chosen, dtype=torch.int64) if rng.random() < 0.5 else chosen
            if call == "share":
                allocator.share(given_ids)
                owners.update(chosen)
            else:
                allocator.release(given_ids)
                owners = owners - Counter(chosen)
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
    allocator.release(ids)
    assert allocator.num_free == 8


@pytest.mark.gpu
def test_no_wait_for_the_device() -> None:
    """Calls of acquire and num_free never wait for the device."""
    allocator = BlockAllocator(64)
    assert allocator.device.type == "cuda" and allocator._top.is_pinned()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ids, host_ids = allocator.acquire_with_host_ids(8)
        assert allocator.num_free == 56
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert ids.tolist() == host_ids
