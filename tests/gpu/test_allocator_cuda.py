"""`BlockAllocator` and CUDA graphs."""

import pytest
import torch

from dsv4_sglang.standalone import BlockAllocator

pytestmark = pytest.mark.gpu


def test_a_capture_is_rejected_and_goes_on() -> None:
    allocator = BlockAllocator(8)
    ids = allocator.acquire(3)
    counter = torch.zeros(1, device=allocator.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counter.add_(1)
        with pytest.raises(RuntimeError, match=r"acquire: .* captured into a CUDA graph"):
            allocator.acquire(1)
        with pytest.raises(RuntimeError, match=r"release: .* captured into a CUDA graph"):
            allocator.release(ids)
    graph.replay()
    assert int(counter) == 1, "the rejections left the capture intact"
    assert allocator.num_free == 5
    allocator.release(ids)
    assert allocator.num_free == 8
