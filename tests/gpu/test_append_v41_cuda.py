"""`append_v41` and `append_v41_keys` on CUDA against the reference: every byte, including those that must not change.

tests/model/test_v41.py compares the reference with DeepSeek's formulas. Tables start as random bytes.
"""

import itertools

import pytest
import torch
from support.kernel_cases import DEVICE, MAX_SHARE, POSITIONS, copied, ops, recorded, tokens_of
from torch import Tensor

import dsv4_sglang.ops  # noqa: F401
from dsv4_sglang.formats import KVBuffer, KVFormat
from dsv4_sglang.model.v41 import pair_rows

pytestmark = pytest.mark.gpu
EPS = 1e-20
BATCH = ("slots", "prefix_lens", "query_start", "token_request", "out_loc")


class Case:
    """A layer that writes entries of `ratio` tokens (0: none), and a step of it. Requests are (state slot or -1, tokens
    before, tokens now)."""

    def __init__(
        self, ratio: int, requests: list[tuple[int, int, int]], decode: bool, draft_tokens: int = 0, seed: int = 0
    ):
        g = torch.Generator().manual_seed(seed)
        self.ratio = ratio
        slots, lengths, start, request, positions, needed = tokens_of(requests)
        tokens = len(request)
        first = torch.tensor([0, *itertools.accumulate(needed)])
        blocks, total = int(first[-1]) + 2, max(int(slots.max()) + 3, 2)
        track = torch.full((tokens,), -1, dtype=torch.int32)
        block = int(lengths[0] + requests[0][2]) // 128 - 1  # the first request's last whole block goes to a snapshot
        track[(request == 0) & (positions // 128 == block)] = total - 1
        per_block = 128 // ratio if ratio else 0
        angles = torch.outer(torch.arange(POSITIONS).float(), torch.rand(32, generator=g))

        def random_bytes(*shape: int) -> Tensor:
            return torch.randint(0, 256, shape, dtype=torch.uint8, generator=g)

        def norm(width: int) -> Tensor:
            return (1 + 0.2 * torch.randn(width, generator=g)).bfloat16()

        scale = 2.0 ** torch.randint(-9, 6, (tokens, 1), generator=g)
        self.read = {
            "kv": (torch.randn(tokens, 576, generator=g) * scale).bfloat16()[:, 64:],
            "kv_score": {
                0: None,
                1: torch.randn(tokens, 512, generator=g).bfloat16(),
                2: torch.randn(tokens, 1024, generator=g) * 3,
            }[ratio],
            "keys": torch.randn(tokens, 128, generator=g).bfloat16(),
            "kv_norm": norm(512),
            "entry_norm": norm(512) if ratio else None,
            "index_norm": norm(128).float(),
            "rope": torch.stack([angles.cos(), angles.sin()], -1).flatten(1),
            "slots": slots,
            "prefix_lens": lengths,
            "query_start": start,
            "token_request": request.int(),
            "out_loc": first[request] * 128 + positions,
            "track": track,
        }
        ring = 128 + draft_tokens
        self.written = {
            "ring": random_bytes(total, ring, 528),
            "compressor_state": torch.randn(total, pair_rows(draft_tokens), 1024, generator=g) if ratio == 2 else None,
            "entries": random_bytes(blocks, per_block, 288) if ratio else None,
            "index_keys": random_bytes(blocks, per_block, 72) if ratio else None,
            "latents": torch.randn(tokens, 512, generator=g).bfloat16() if ratio else None,
            "window": None if decode else random_bytes(1, tokens + 128 * len(requests), 528),
        }

    def on(self, device) -> tuple[dict, dict]:
        return copied(self.read, device), copied(self.written, device)

    def append(self, implementation, read: dict, written: dict) -> None:
        implementation.append_v41(
            read["kv"], read["kv_score"], read["kv_norm"], read["entry_norm"], read["rope"], EPS, self.ratio,
            *(read[name] for name in BATCH), read["track"], written["ring"], written["compressor_state"],
            written["entries"], written["latents"], written["window"],
        )  # fmt: skip

    def append_keys(self, implementation, read: dict, written: dict) -> None:
        batch = (read[name] for name in BATCH)
        implementation.append_v41_keys(
            read["keys"], read["index_norm"], read["rope"], EPS, self.ratio, *batch, written["index_keys"]
        )

    def run(self, implementation, read: dict, written: dict) -> None:
        self.append(implementation, read, written)
        if self.ratio:
            self.append_keys(implementation, read, written)

    def check(self) -> None:
        cpu, gpu = self.on("cpu"), self.on(DEVICE)
        self.run(torch.ops.dsv4_sglang, *cpu)
        self.run(ops(), *gpu)
        compare(gpu[1], cpu[1])


def compare(got: dict, expected: dict) -> None:
    for name, b in expected.items():
        if b is None:
            continue
        a = got[name].cpu()
        if name == "compressor_state":
            assert torch.equal(a, b), "a token that waits for its partner is copied"
        elif name == "latents":  # the last bit of a sum may decide the rounding to bf16
            apart = (a.float() - b.float()).abs()
            assert (apart > 0).float().mean() <= 1e-3 and (apart <= 2.0**-7 * b.float().abs()).all()
        else:
            wrong = (a != b).nonzero()
            assert len(wrong) <= MAX_SHARE * a.numel() + 1, f"{name}: {len(wrong)} differ, first {wrong[0].tolist()}"


@pytest.mark.parametrize("ratio", [0, 1])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_input_reaches_its_entries_only(ratio, value):
    """One such number in a token's projections makes its entries unreadable, and no other."""
    case = Case(ratio, [(1, 131, 1), (2, 3, 1)], decode=True)
    case.read["kv"][0, 7] = value
    if ratio:
        case.read["kv_score"][0, 7] = value
    for implementation, device in ((torch.ops.dsv4_sglang, "cpu"), (ops(), DEVICE)):
        read, written = case.on(device)
        case.append(implementation, read, written)
        rows = [("ring", KVFormat.MXFP8, torch.tensor([128 + 131 % 128, 2 * 128 + 3]))]
        rows += [("entries", KVFormat.NVFP4, case.read["out_loc"])] if ratio else []
        for name, stored, at in rows:
            found = KVBuffer(written[name].cpu(), stored).read(at)
            assert found.isfinite().all(-1).tolist() == [False, True], (name, device)


@pytest.mark.parametrize("ratio", [0, 1, 2])
@pytest.mark.parametrize("batch", [1, 64])
def test_decode(ratio, batch):
    g = torch.Generator().manual_seed(batch)
    lengths = torch.randint(0, 900, (batch,), generator=g).tolist()
    requests = [(-1 if b % 7 == 5 else b + 1, length, 1) for b, length in enumerate(lengths)]
    Case(ratio, requests, decode=True).check()


@pytest.mark.parametrize("ratio", [0, 1, 2])
@pytest.mark.parametrize("d", [2, 5, 8])
def test_decode_with_drafts(ratio, d):
    requests = [(b + 1, length, d) for b, length in enumerate((0, 1, 2, 125, 126, 127, 128, 400, 401))]
    Case(ratio, requests, decode=True, draft_tokens=d).check()


@pytest.mark.parametrize("ratio", [0, 1, 2])
@pytest.mark.parametrize(
    "requests",
    [
        [(1, 0, 300), (2, 0, 1), (3, 0, 2)],
        [(1, 1, 1), (2, 1, 2), (3, 127, 129), (4, 128, 128), (5, 129, 127), (6, 131, 1), (-1, 50, 70)],
        [(3, 700, 500), (1, 40, 30), (2, 255, 1), (4, 99, 0), (5, 301, 128)],
    ],
    ids=["fresh", "edges", "chunks"],
)
@pytest.mark.parametrize("draft_tokens", [0, 5])
def test_prefill(ratio, requests, draft_tokens):
    Case(ratio, requests, decode=False, draft_tokens=draft_tokens).check()


@pytest.mark.parametrize("ratio", [1, 2])
def test_the_same_bytes_every_time(ratio):
    case = Case(ratio, [(1, 3, 700), (2, 1, 333), (3, 64, 64)], decode=False)
    runs = [case.on(DEVICE) for _ in range(3)]
    for run in runs:
        case.run(ops(), *run)
    for _, written in runs[1:]:
        assert all(t is None or torch.equal(t, runs[0][1][name]) for name, t in written.items())


def test_graph_replay():
    case, other = (
        Case(2, [(1, n, 1), (2, n + 1, 1), (3, n + 7, 1)], decode=True, seed=seed) for seed, n in ((0, 8), (1, 40))
    )
    read, written = case.on(DEVICE)
    graph, _ = recorded(lambda: case.run(torch.ops.dsv4_sglang, read, written))
    start = case.on(DEVICE)[1]
    for name in ("kv", "kv_score", "keys", "prefix_lens"):
        read[name].copy_(other.read[name])
    read["out_loc"].copy_(torch.tensor([40, 128 + 41, 2 * 128 + 47]))
    for name, t in written.items():
        if t is not None:
            t.copy_(start[name])
    graph.replay()
    cpu = {name: None if t is None else t.cpu() for name, t in read.items()}, case.on("cpu")[1]
    case.run(torch.ops.dsv4_sglang, *cpu)
    compare(written, cpu[1])


def test_errors_name_the_tensor():
    case = Case(2, [(1, 3, 2), (2, 3, 2)], decode=True)
    with pytest.raises(
        RuntimeError, match="append_v41: 2 tokens of each request without `window`, but ring has 128 rows"
    ):
        case.run(ops(), *case.on(DEVICE))
    case = Case(2, [(1, 3, 1)], decode=True)
    for name, change, said in (
        ("kv", lambda t: t.float(), "append_v41: kv is Float"),
        ("kv_score", lambda t: t.bfloat16(), r"append_v41: kv_score is BFloat16 \[1, 1024\].*expected Float"),
        ("latents", lambda t: None, "append_v41: latents is missing; expected a tensor for ratio 2"),
        ("entries", lambda t: t[:, :32], r"append_v41: entries is Byte .*expected Byte \[any, 64, 288\]"),
        ("index_keys", lambda t: t.float(), r"append_v41_keys: index_keys is Float"),
    ):
        read, written = case.on(DEVICE)
        tensors = read if name in read else written
        tensors[name] = change(tensors[name])
        with pytest.raises(RuntimeError, match=said):
            case.run(ops(), read, written)
    case.ratio = 3
    with pytest.raises(RuntimeError, match="append_v41: ratio is 3; expected 0, 1 or 2"):
        case.run(ops(), *case.on(DEVICE))
