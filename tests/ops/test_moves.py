"""The ops that copy blocks and state: what they reject, and that nothing is written then.

gpu/test_moves_cuda.py compares the bytes that the kernels copy with those of the reference.
"""

import pytest
import torch
from support.kernel_cases import printed
from torch import Tensor

from dsv4_sglang.ops import extension


def copy_rejected(device: torch.device, capfd: pytest.CaptureFixture[str], message: str, *arguments) -> int:
    """Copy states that must be rejected, and return the pair that is written to `rejected`.

    The reference raises an exception. A kernel prints, because the host does not wait for it.
    """
    copy_state, rejected = torch.ops.dsv4_sglang.copy_state, torch.tensor([7], dtype=torch.int32, device=device)
    if device.type == "cpu":
        with pytest.raises(ValueError) as error:
            copy_state(*arguments, rejected)
        said = str(error.value)
    else:
        extension.load()
        copy_state(*arguments, rejected)
        copy_state(*arguments)
        said = printed(capfd)
    assert f"copy_state: {message}" in said
    return int(rejected)


def pairs_on(device: torch.device, source: list[int], destination: list[int]) -> tuple[Tensor, Tensor]:
    return tuple(torch.tensor(slots, dtype=torch.int32, device=device) for slots in (source, destination))


@pytest.mark.parametrize("count", [2, 40], ids=["one launch", "two launches"])
def test_copy_state_rejects_missing_slots(device: torch.device, count: int, capfd: pytest.CaptureFixture[str]) -> None:
    """The last tensor has the fewest slots. No tensor is written, in no launch of the call."""
    before = [*(torch.randn(2, 6, 5) for _ in range(count - 1)), torch.randn(2, 5, 3)]
    tensors = [tensor.to(device, copy=True) for tensor in before]
    source, destination = pairs_on(device, [0, 9, 1, 5], [2, -1, 5, 3])
    message = "pair 2, slot 1 to slot 5, is out of range for tensors of 5 slots"
    assert copy_rejected(device, capfd, message, source, destination, tensors) == 2
    assert all(torch.equal(tensor.cpu(), old) for tensor, old in zip(tensors, before))
    rejected = torch.tensor([7], dtype=torch.int32, device=device)
    torch.ops.dsv4_sglang.copy_state(source[:2], destination[:2], tensors, rejected)
    assert int(rejected) == -1
    assert all(torch.equal(tensor[:, 2].cpu(), old[:, 0]) for tensor, old in zip(tensors, before))


def test_copy_state_rejects_a_repeated_destination(device: torch.device, capfd: pytest.CaptureFixture[str]) -> None:
    """A skipped pair (-1) has no destination. The reference copies nothing, a kernel the other pairs."""
    before = torch.randn(2, 6, 5)
    tensors = [before.to(device, copy=True)]
    source, destination = pairs_on(device, [0, 1, 1, 2], [4, 3, -1, 3])
    message = "pair 1, slot 1 to slot 3, has the same destination as"
    assert copy_rejected(device, capfd, message, source, destination, tensors) == 1
    expected = before.clone()
    if device.type == "cuda":
        expected[:, 4] = before[:, 0]
    assert torch.equal(tensors[0].cpu(), expected)
    source[3], rejected = -1, torch.tensor([7], dtype=torch.int32, device=device)
    torch.ops.dsv4_sglang.copy_state(source, destination, tensors, rejected)
    assert int(rejected) == -1 and torch.equal(tensors[0][:, 3:5].cpu(), before[:, [1, 0]])


def test_swap_blocks_validates_before_it_moves():
    pools = [torch.randn(8, 5), torch.randn(8, 2, 3)]
    host = torch.zeros(6, 4 * 11 + 3, dtype=torch.uint8)
    before = [pool.clone() for pool in pools]
    blocks, rows = torch.tensor([1, 2, 3, 7]), torch.tensor([4, 5, 0, 2])
    torch.ops.dsv4_sglang.swap_blocks(pools, host, blocks, rows, True, [27, 3])
    assert torch.equal(host[rows][:, 27:], pools[0][blocks].view(torch.uint8))
    assert torch.equal(host[rows][:, 3:27], pools[1][blocks].flatten(1).view(torch.uint8))
    assert not host[:, :3].any() and not host[[1, 3]].any()
    for pool in pools:
        pool.zero_()
    torch.ops.dsv4_sglang.swap_blocks(pools, host, blocks, rows, False, [27, 3])
    assert all(torch.equal(pool[blocks], old[blocks]) for pool, old in zip(pools, before))
    kept = host.clone()
    for bad_blocks, bad_rows, offsets, message in (
        ([0, 8], [0, 1], [0, 20], "block 8"),
        ([0, 1], [0, -1], [0, 20], "host row -1"),
        ([0, 1], [0, 0], [0, 20], "twice"),
        ([0, 1], [0], [0, 20], "2 blocks and 1 host rows"),
        ([0], [0], [0, 24], r"bytes 24\.\.48 are not within host rows of 47 bytes"),
        ([0], [0], [0], "1 offsets for 2 pools"),
    ):
        with pytest.raises(ValueError, match=message):
            torch.ops.dsv4_sglang.swap_blocks(
                pools, host, torch.tensor(bad_blocks), torch.tensor(bad_rows), True, offsets
            )
    assert torch.equal(host, kept)
