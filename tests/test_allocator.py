"""`BlockAllocator` against a reference count of owners."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4_sglang.standalone import BlockAllocator


def test_first_blocks_and_counts(device: torch.device) -> None:
    allocator = BlockAllocator(10, device)
    assert allocator.num_free == 10
    ids = allocator.acquire(4)
    assert ids.tolist() == [0, 1, 2, 3]
    assert (ids.dtype, ids.device.type) == (torch.int32, device.type)
    assert allocator.num_free == 6
    allocator.release(ids)
    assert allocator.num_free == 10


def test_released_blocks_go_first(device: torch.device) -> None:
    allocator = BlockAllocator(10, device)
    first = allocator.acquire(5)
    allocator.release(first[1:3])
    assert allocator.acquire(3).tolist() == [2, 1, 5]


def test_acquired_ids_outlive_later_releases(device: torch.device) -> None:
    """The ids are a copy: later releases overwrite the memory of the stack that they came from."""
    allocator = BlockAllocator(4, device)
    a, b = allocator.acquire(2), allocator.acquire(2)
    allocator.release(a)
    allocator.release(b)
    allocator.acquire(4)
    assert (a.tolist(), b.tolist()) == ([0, 1], [2, 3])


def test_out_of_memory_takes_nothing(device: torch.device) -> None:
    allocator = BlockAllocator(5, device)
    allocator.acquire(2)
    with pytest.raises(RuntimeError, match=r"OOM: 4 blocks requested, 3 free of 5"):
        allocator.acquire(4)
    assert allocator.num_free == 3
    assert allocator.acquire(3).tolist() == [2, 3, 4]


def test_acquire_nothing(device: torch.device) -> None:
    allocator = BlockAllocator(1, device)
    allocator.acquire(1)
    empty = allocator.acquire(0)
    assert empty.shape == (0,)
    assert empty.dtype == torch.int32
    allocator.release(empty)
    allocator.release([])
    assert allocator.num_free == 0


def test_acquire_negative() -> None:
    with pytest.raises(ValueError, match="-1 blocks"):
        BlockAllocator(1, "cpu").acquire(-1)


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
def test_bad_release_changes_nothing(device: torch.device, ids: list[int], message: str) -> None:
    allocator = BlockAllocator(8, device)
    allocator.acquire(4)
    for given_ids in (ids, torch.tensor(ids, dtype=torch.int32, device=device)):
        with pytest.raises(ValueError, match=message):
            allocator.release(given_ids)
    assert allocator.num_free == 4
    assert sorted(allocator.acquire(4).tolist()) == [4, 5, 6, 7]
    allocator.release([0, 1, 2, 3])


def test_double_release(device: torch.device) -> None:
    allocator = BlockAllocator(4, device)
    ids = allocator.acquire(3)
    allocator.release(ids[:1])
    with pytest.raises(ValueError, match="block 0 is already free"):
        allocator.release(ids[:1])
    allocator.release(ids[1:])
    assert sorted(allocator.acquire(4).tolist()) == [0, 1, 2, 3]


def test_a_shared_block_is_free_with_its_last_owner(device: torch.device) -> None:
    allocator = BlockAllocator(4, device)
    ids = allocator.acquire(3)
    allocator.share(ids[1:])
    allocator.share([2])
    assert [allocator.owners(block) for block in range(4)] == [1, 2, 3, 0]
    allocator.release(ids)
    assert (allocator.num_free, allocator.acquire(2).tolist()) == (2, [0, 3])
    allocator.release([1, 2])
    assert allocator.num_free == 1
    allocator.release(torch.tensor([2], device=device))
    with pytest.raises(ValueError, match="block 2 is already free"):
        allocator.release([2])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 1, 2], "share: 3 blocks given, only 2 of 4 are allocated"),
        ([4], r"share: block 4 is not in 0\.\.3"),
        ([0, 2], "share: block 2 is already free"),
        ([1, 1], "share: block 1 is listed twice"),
    ],
)
def test_bad_share_changes_nothing(ids: list[int], message: str) -> None:
    allocator = BlockAllocator(4, "cpu")
    allocator.acquire(2)
    with pytest.raises(ValueError, match=message):
        allocator.share(ids)
    assert [allocator.owners(block) for block in range(4)] == [1, 1, 0, 0]


@pytest.mark.parametrize("ids", [torch.tensor([0.0]), torch.tensor([True]), torch.tensor([[0]]), torch.tensor(0)])
def test_release_of_something_else(ids: torch.Tensor) -> None:
    allocator = BlockAllocator(2, "cpu")
    allocator.acquire(1)
    with pytest.raises(ValueError, match="expected ints of shape"):
        allocator.release(ids)
    assert allocator.num_free == 1


def test_negative_total() -> None:
    with pytest.raises(ValueError, match="num_total_blocks is -1"):
        BlockAllocator(-1, "cpu")


def test_a_capture_is_rejected_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph would return the same ids in every replay. tests/gpu/test_allocator_cuda.py captures one."""
    allocator = BlockAllocator(4, "cpu")
    ids = allocator.acquire(2)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    allocator.acquire(1)  # a graph does not capture CPU work
    monkeypatch.setattr(allocator, "device", torch.device("cuda"))
    with pytest.raises(RuntimeError, match=r"acquire: .* captured into a CUDA graph"):
        allocator.acquire(1)
    with pytest.raises(RuntimeError, match=r"release: .* captured into a CUDA graph"):
        allocator.release(ids)
    assert allocator.num_free == 1


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
def test_default_device_and_pinned_top() -> None:
    allocator = BlockAllocator(4)
    assert allocator.device.type == "cuda"
    assert allocator._top.is_pinned()


@pytest.mark.gpu
def test_no_wait_for_the_device() -> None:
    """Calls of acquire and num_free never wait for the device."""
    allocator = BlockAllocator(64)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ids, host_ids = allocator.acquire_with_host_ids(8)
        assert allocator.num_free == 56
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert ids.tolist() == host_ids
