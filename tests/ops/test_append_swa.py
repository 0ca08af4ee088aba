"""`append_swa`, which writes KV entries into the window rings."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dsv4_sglang.ops  # noqa: F401
from dsv4_sglang.cache.device import resolve_device
from dsv4_sglang.formats import KVBuffer, KVFormat
from dsv4_sglang.formats.kv_entries import fp8_views

SLOTS = 4


def make_ring() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return a ring buffer and its split views, as `StateCachePool` exposes them."""
    table = torch.zeros(SLOTS, 128 * 584, dtype=torch.uint8).as_strided((SLOTS, 128, 584), (128 * 584, 584, 1))
    fp8, rope, inv_scale = fp8_views(table)
    return table, {
        "swa_fp8": fp8,
        "swa_rope": rope,
        "swa_inv": inv_scale,
        "swa_pos": torch.full((SLOTS, 128), -1, dtype=torch.int32),
        "swa_head": torch.zeros(SLOTS, dtype=torch.int32),
    }


def run(kv, slots, positions, views) -> None:
    torch.ops.dsv4_sglang.append_swa(
        kv, torch.tensor(slots, dtype=torch.int32), torch.tensor(positions, dtype=torch.int32), *views.values(), 64
    )


def test_round_trip_error_and_exact_rope_half():
    table, views = make_ring()
    kv = torch.randn(100, 512).bfloat16()
    run(kv, [2] * 100, list(range(100)), views)
    got = KVBuffer(table, KVFormat.FP8).read(2 * 128 + torch.arange(100))
    assert torch.equal(got[:, 448:], kv[:, 448:].float())
    x = kv[:, :448].float()
    assert float((got[:, :448] - x).norm() / x.norm()) < 0.036
    scale = views["swa_inv"][2, :100].float()
    normal = x.abs() > scale[:, None] * 2.0**-6
    assert ((got[:, :448] - x).abs() / x.abs())[normal].max() <= 2.0**-4  # half a unit of a 3-bit mantissa
    assert torch.equal(
        KVBuffer(table, KVFormat.FP8).strips()[1][2, :100],
        KVBuffer(table, KVFormat.FP8).strips()[1][2, :100, :1].expand(-1, 8),
    )
    assert not table[[0, 1, 3]].any(), "other requests are untouched"


def test_ring_keeps_128_tokens_and_skips_padding():
    table, views = make_ring()
    kv = torch.randn(301, 512).bfloat16()
    run(kv, [1] * 300 + [-1], [*range(300), 5], views)
    with pytest.raises(ValueError, match=r"raw_kv is torch.float32"):
        run(kv.float(), [0] * 301, [0] * 301, views)
    expected, expected_views = make_ring()
    run(kv[172:300], [1] * 128, list(range(172, 300)), expected_views)
    assert torch.equal(table, expected)
    assert views["swa_head"].tolist() == [0, 300 % 128, 0, 0]
    assert sorted(views["swa_pos"][1].tolist()) == list(range(172, 300))


@pytest.mark.parametrize(("rope_dim", "columns"), [(32, 480), (64, 448), (32, 512)])
def test_dims_that_do_not_fit_the_rings(rope_dim, columns):
    table, views = make_ring()
    one = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(
        ValueError, match=f"rope_dim {rope_dim} and rows of {columns} do not fit rings of 448 FP8 and 64"
    ):
        torch.ops.dsv4_sglang.append_swa(torch.ones(1, columns).bfloat16(), one, one, *views.values(), rope_dim)
    assert not table.any() and views["swa_head"].tolist() == [0] * SLOTS


@settings(max_examples=30, deadline=None)
@given(st.permutations(list(range(12))), st.lists(st.integers(0, 300), min_size=12, max_size=12, unique=True))
def test_the_order_of_tokens_does_not_matter(order, positions):
    kv = torch.randn(12, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    slots = [i % 3 for i in range(12)]
    one, one_views = make_ring()
    two, two_views = make_ring()
    run(kv, slots, positions, one_views)
    run(kv[list(order)], [slots[i] for i in order], [positions[i] for i in order], two_views)
    assert torch.equal(one, two)
    assert all(torch.equal(one_views[k].view(torch.uint8), two_views[k].view(torch.uint8)) for k in one_views)


def test_append_writes_positions_of_draft_rings(device):
    """Positions and head follow from the ring's length, 132 entries here, not from the window."""
    device = resolve_device(device)
    ring = torch.zeros(3, 132, 512, device=device)
    positions, head = torch.full((3, 132), -1, dtype=torch.int32, device=device), torch.zeros(3, device=device).int()
    count, length = 7, 130
    batch = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([1], [length], [0, count], [0] * count)]

    def append(written: int) -> None:
        torch.ops.dsv4_sglang.append(
            torch.randn(count, 512, device=device), None, None, torch.ones(512, device=device), None, None, None, None,
            torch.ones(200, 64, device=device), 1e-6, 0, KVFormat.FP32.code, 0, *batch,
            torch.arange(length, length + written, device=device), None, ring, None, None, None,
            torch.zeros(1, count + 128, 512, device=device), positions, head, None,
        )  # fmt: skip

    with pytest.raises((ValueError, RuntimeError), match="append: out_loc"):
        append(count - 1)
    assert not ring.any() and bool((positions == -1).all())
    append(count)
    expected = torch.full((3, 132), -1, dtype=torch.int32)
    expected[1, [130, 131, 0, 1, 2, 3, 4]] = torch.arange(length, length + count).int()
    assert torch.equal(positions.cpu(), expected) and head.tolist() == [0, 5, 0]
