"""`append_swa` on CUDA against the reference: byte for byte, for any order and number of tokens."""

from dataclasses import dataclass

import kernel_cases
import pytest
import torch
from kernel_cases import ops, recorded
from torch import Tensor

pytestmark = pytest.mark.gpu
BLOCK = 128 * 584


@dataclass
class Ring:
    """A ring of random bytes, its split views, and the two integer tables."""

    memory: Tensor
    pos: Tensor
    head: Tensor

    @classmethod
    def make(cls, slots: int, padding: int = 0) -> "Ring":
        g = torch.Generator().manual_seed(3)
        memory = torch.randint(0, 256, (slots, BLOCK + padding), dtype=torch.uint8, generator=g)
        pos = torch.randint(0, 999, (slots, 128), dtype=torch.int32, generator=g)
        return cls(memory, pos, torch.randint(0, 99, (slots,), dtype=torch.int32, generator=g))

    def on(self, device) -> "Ring":
        return Ring(*(t.clone().to(device) for t in (self.memory, self.pos, self.head)))

    def views(self) -> tuple[Tensor, Tensor, Tensor]:
        slots, stride = self.memory.shape
        return (
            self.memory.as_strided((slots, 128, 448), (stride, 576, 1)),
            self.memory.view(torch.bfloat16).as_strided((slots, 128, 64), (stride // 2, 288, 1), 224),
            self.memory.view(torch.float8_e8m0fnu).as_strided((slots, 128), (stride, 8), 128 * 576),
        )

    def append(self, implementation, kv: Tensor, slots: Tensor, positions: Tensor) -> None:
        device = self.memory.device
        tokens = kv.to(device), slots.int().to(device), positions.int().to(device)
        implementation.append_swa(*tokens, *self.views(), self.pos, self.head, 64)


def check(kv: Tensor, slots: Tensor, positions: Tensor, rings: int = 6, padding: int = 0) -> Ring:
    start = Ring.make(rings, padding)
    expected, got = start.on("cpu"), start.on(kernel_cases.DEVICE)
    expected.append(torch.ops.dsv4_sglang, kv, slots, positions)
    got.append(ops(), kv, slots, positions)
    for name in ("memory", "pos", "head"):
        wrong = (getattr(got, name).cpu() != getattr(expected, name)).nonzero()
        assert not len(wrong), f"{name}: {len(wrong)} differ, the first at {wrong[0].tolist()}"
    return got


def rows(tokens: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    scale = 2.0 ** torch.randint(-20, 20, (tokens, 1), generator=g)
    return (torch.randn(tokens, 512, generator=g) * scale).bfloat16()


@pytest.mark.parametrize("tokens", [1, 2, 16, 64, 256])
def test_decode(tokens):
    slots = torch.randperm(tokens, generator=torch.Generator().manual_seed(1))
    slots[::5] = -1
    check(rows(tokens), slots, (torch.arange(tokens) * 37) % 1000, rings=tokens, padding=64)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("count", [3, 127, 128, 129, 300, 700])
def test_many_tokens_of_a_request(count, shuffle):
    """Also more than the window: only the last 128 positions stay, in any order of the tokens."""
    starts = {0: 0, 2: 5, 3: 127, 5: 1000}
    slots = torch.tensor([s for s in starts for _ in range(count)] + [-1] * 3)
    positions = torch.cat([torch.arange(p, p + count) for p in starts.values()] + [torch.arange(3)])
    order = torch.randperm(len(slots)) if shuffle else torch.arange(len(slots))
    got = check(rows(len(slots))[order], slots[order], positions[order])
    assert got.head.cpu()[[0, 2, 3, 5]].tolist() == [(p + count) % 128 for p in starts.values()]


def test_equal_positions_take_the_last_token():
    check(rows(6), torch.tensor([1, 1, 1, 2, 2, 1]), torch.tensor([5, 5, 133, 7, 7, 5]))


def test_corner_values():
    """Zeros, a single largest value, values at the scale's boundary, subnormal codes, negative zero."""
    kv = rows(8)
    kv[0] = 0
    kv[1, :] = -0.0
    kv[2, :448] = 448.0
    kv[3, :448] = 449.0
    kv[4, 0] = 3e38
    kv[5, :448] = torch.linspace(-1e-7, 1e-7, 448).bfloat16()
    kv[6, :448] = torch.linspace(-450, 450, 448).bfloat16()
    check(kv, torch.arange(8) % 6, torch.arange(8))


def test_no_tokens():
    check(rows(0), torch.zeros(0), torch.zeros(0))


def test_graph_replay():
    start = Ring.make(4)
    got = start.on(kernel_cases.DEVICE)
    device = kernel_cases.DEVICE
    kv, slots = rows(3).to(device), torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    positions = torch.tensor([4, 130, 127], dtype=torch.int32, device=device)
    graph, _ = recorded(lambda: got.append(torch.ops.dsv4_sglang, kv, slots, positions))
    kv.copy_(rows(3, seed=8)), slots.copy_(torch.tensor([3, -1, 0])), positions.copy_(torch.tensor([0, 9, 255]))
    for name in ("memory", "pos", "head"):
        getattr(got, name).copy_(getattr(start, name))
    graph.replay()
    expected = start.on("cpu")
    expected.append(torch.ops.dsv4_sglang, kv.cpu(), slots.cpu(), positions.cpu())
    assert torch.equal(got.memory.cpu(), expected.memory) and torch.equal(got.head.cpu(), expected.head)


def test_errors_name_the_tensor():
    ring = Ring.make(2).on(kernel_cases.DEVICE)
    kv, slots, positions = rows(2), torch.zeros(2), torch.zeros(2)
    with pytest.raises(RuntimeError, match="append_swa: raw_kv is Float"):
        ring.append(ops(), kv.float(), slots, positions)
    with pytest.raises(RuntimeError, match=r"append_swa: positions is Int \[1\]"):
        ring.append(ops(), kv, slots, positions[:1])
    with pytest.raises(RuntimeError, match="append_swa: head_dim is 510"):
        ring.append(ops(), kv[:, :510], slots, positions)
