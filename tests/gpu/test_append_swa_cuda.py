"""`append_swa` on CUDA against the reference: byte for byte, for any order and number of tokens."""

from dataclasses import dataclass

import pytest
import torch
from support.kernel_cases import DEVICE, ops, recorded
from torch import Tensor

from dsv4_sglang.formats.kv_entries import fp8_views

pytestmark = pytest.mark.gpu


@dataclass
class Ring:
    """Rings of random bytes with `padding` bytes after each, and the two integer tables."""

    memory: Tensor
    pos: Tensor
    head: Tensor

    @classmethod
    def make(cls, slots: int, padding: int = 0) -> "Ring":
        g = torch.Generator().manual_seed(3)
        memory = torch.randint(0, 256, (slots, 128 * 584 + padding), dtype=torch.uint8, generator=g)
        pos = torch.randint(0, 999, (slots, 128), dtype=torch.int32, generator=g)
        return cls(memory, pos, torch.randint(0, 99, (slots,), dtype=torch.int32, generator=g))

    def on(self, device) -> "Ring":
        return Ring(*(t.clone().to(device) for t in vars(self).values()))

    def append(self, implementation, kv: Tensor, slots: Tensor, positions: Tensor) -> None:
        device, (rings, stride) = self.memory.device, self.memory.shape
        tokens = kv.to(device), slots.int().to(device), positions.int().to(device)
        views = fp8_views(self.memory.as_strided((rings, 128, 584), (stride, 584, 1)))
        implementation.append_swa(*tokens, *views, self.pos, self.head, 64)


def compare(got: Ring, expected: Ring) -> None:
    for name, table in vars(expected).items():
        wrong = (getattr(got, name).cpu() != table).nonzero()
        assert not len(wrong), f"{name}: {len(wrong)} differ, the first at {wrong[0].tolist()}"


def check(kv: Tensor, slots: Tensor, positions: Tensor, rings: int = 6, padding: int = 0) -> Ring:
    start = Ring.make(rings, padding)
    expected, got = start.on("cpu"), start.on(DEVICE)
    expected.append(torch.ops.dsv4_sglang, kv, slots, positions)
    got.append(ops(), kv, slots, positions)
    compare(got, expected)
    return got


def rows(tokens: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    scale = 2.0 ** torch.randint(-20, 20, (tokens, 1), generator=g)
    return (torch.randn(tokens, 512, generator=g) * scale).bfloat16()


@pytest.mark.parametrize("tokens", [0, 1, 64, 256])
def test_decode(tokens):
    slots = torch.randperm(tokens, generator=torch.Generator().manual_seed(1))
    slots[::5] = -1
    check(rows(tokens), slots, (torch.arange(tokens) * 37) % 1000, rings=tokens + 1, padding=64)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("count", [3, 128, 129, 700])
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


def test_graph_replay():
    start = Ring.make(4)
    got = start.on(DEVICE)
    kv, slots = rows(3).to(DEVICE), torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([4, 130, 127], dtype=torch.int32, device=DEVICE)
    graph, _ = recorded(lambda: got.append(torch.ops.dsv4_sglang, kv, slots, positions))
    kv.copy_(rows(3, seed=8)), slots.copy_(torch.tensor([3, -1, 0])), positions.copy_(torch.tensor([0, 9, 255]))
    for name, table in vars(start).items():
        getattr(got, name).copy_(table)
    graph.replay()
    expected = start.on("cpu")
    expected.append(torch.ops.dsv4_sglang, kv.cpu(), slots.cpu(), positions.cpu())
    compare(got, expected)


def test_errors_name_the_tensor():
    ring = Ring.make(2).on(DEVICE)
    kv, slots, positions = rows(2), torch.zeros(2), torch.zeros(2)
    with pytest.raises(RuntimeError, match="append_swa: raw_kv is Float"):
        ring.append(ops(), kv.float(), slots, positions)
    with pytest.raises(RuntimeError, match=r"append_swa: positions is Int \[1\]"):
        ring.append(ops(), kv, slots, positions[:1])
    with pytest.raises(RuntimeError, match="append_swa: head_dim is 510"):
        ring.append(ops(), kv[:, :510], slots, positions)
