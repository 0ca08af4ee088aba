"""Inputs of `index_topk` with candidates that cover all corner cases, made on the CPU from a seed: the counterpart of
`attention_cases` for V4.1's keys."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_sglang.formats import KeyFormat, KVBuffer
from dsv4_sglang.ops.cuda_index import listed_blocks, score_columns
from dsv4_sglang.ops.reference import read
from support.attention_cases import IndexInputs, index_inputs, rope


@dataclass
class CandidateCase(IndexInputs):
    """Arguments of `index_topk` without those for candidates and the output."""

    ratio: int
    top: int

    @property
    def visible(self) -> Tensor:
        return (self.positions + 1) // self.ratio

    @property
    def query(self) -> Tensor:
        return read.index_query(self.q, self.positions, self.rope, KeyFormat.MXFP4, hadamard=False)

    def rows_of(self, request: int) -> Tensor:
        """Return the table row of every entry that the request can have."""
        per_block = self.index_keys.shape[1]
        return (self.block_table[request].long()[:, None] * per_block + torch.arange(per_block)).flatten()

    def keys(self, request: int) -> Tensor:
        return KVBuffer(self.index_keys, KeyFormat.MXFP4).read(self.rows_of(request))[
            : int(self.visible[self.token_request == request].max())
        ]

    def scores(self, t: int) -> Tensor:
        """Return the scores of the visible entries of a token in float64. They are exact in fp32 in any order."""
        keys = self.keys(int(self.token_request[t])).double()[: int(self.visible[t])]
        return ((self.query[t].double() @ keys.T).relu() * self.weights[t].double()[:, None]).sum(0)

    def candidates(self, most: int) -> Tensor:
        return torch.full((len(self.positions), most), -7, dtype=torch.int32)

    def select(
        self,
        size: int,
        kept: Tensor | None = None,
        within: Tensor | None = None,
        op: Callable = torch.ops.dsv4_sglang.index_topk,
        device: torch.device | str = "cpu",
        slices: int | None = None,
    ) -> Tensor:
        """Return the rows [tokens, top] that the op selects, and write `kept`. `slices`: rows of the scratch."""
        rows = torch.full((len(self.positions), self.top), -7, dtype=torch.int32, device=device)
        moved = [None if x is None else x.to(device) for x in (kept, within)]
        op(*self.args(size, rows, kept if within is None else within, slices), *moved)
        if kept is not None:
            kept.copy_(moved[0])
        return rows.cpu()

    def args(self, size: int, rows: Tensor, blocks: Tensor | None, slices: int | None = None) -> tuple:
        """Return the arguments of the op before the candidates `blocks`. `rows` receives the selection."""
        inputs = [x.to(rows.device) for x in list(vars(self).values())[:-2]]
        columns = score_columns(
            self.block_table.shape[1] * self.index_keys.shape[1],
            self.top,
            listed_blocks(self.top, 0 if blocks is None else blocks.shape[1]),
        )
        scores = torch.full((slices or len(rows), columns), float("nan"), device=rows.device)
        return *inputs, KeyFormat.MXFP4.code, scores, rows, self.ratio, False, size

    def check(
        self, op: Callable, size: int, most: int, device: torch.device | str = "cpu", slices: int | None = None
    ) -> None:
        """Check that `op` selects and chooses candidates as the reference."""
        expected, got = self.candidates(most), self.candidates(most)
        for kept, within in ((None, None), (expected, None), (None, expected)):
            other = got if kept is expected else kept
            assert torch.equal(self.select(size, kept, within), self.select(size, other, within, op, device, slices))
        assert torch.equal(expected, got)

    def entries(self, size: int, kept: Tensor | None = None, within: Tensor | None = None) -> list[list[int]]:
        """Return the entries that the op selects for each token."""
        chosen = []
        for request, row in zip(self.token_request.tolist(), self.select(size, kept, within).tolist()):
            number = {row: entry for entry, row in enumerate(self.rows_of(request).tolist())}
            listed = [number[r] for r in row if r >= 0]
            assert row[len(listed) :] == [-1] * (len(row) - len(listed)) and listed == sorted(set(listed))
            chosen.append(listed)
        return chosen


def candidate_case(
    *, lens: list[tuple[int, int]], ratio: int, top: int, heads: int = 32, equal: bool = False, seed: int = 0
) -> CandidateCase:
    """Make a case whose scores are exact, because weights are multiples of 1/2. Unseen keys have NaN scales.

    `lens` gives the first and last position + 1 of each request's tokens in the step. With `equal`, there are only
    seven different keys, so scores tie.
    """
    g = torch.Generator().manual_seed(seed)
    inputs = index_inputs(lens, ratio, KeyFormat.MXFP4, lambda y: y, 7 if equal else 0, heads, g)
    weights = torch.randint(-2, 5, inputs["q"].shape[:2], generator=g) / 2
    inputs["q"] = inputs["q"].bfloat16()
    return CandidateCase(**inputs, weights=weights, ratio=ratio, top=top)


def long_case(*, context: int, positions: list[int], ratio: int, top: int, heads: int = 32) -> CandidateCase:
    """Make a case of one request of `context` tokens, some of which are in the step. Its keys are random codes with
    scales of 1 and 2."""
    g = torch.Generator().manual_seed(ratio)
    blocks, per_block, tokens = -(-context // 128), 128 // ratio, len(positions)
    keys = torch.randint(0, 256, (blocks, per_block * KeyFormat.MXFP4.width), generator=g, dtype=torch.uint8)
    scales = torch.randint(0, 2, (blocks, per_block * 8), generator=g, dtype=torch.uint8)
    keys[:, per_block * 64 :] = 0x38 + 8 * scales
    return CandidateCase(
        q=torch.randn(tokens, heads, 128, generator=g).bfloat16(),
        weights=torch.randint(-2, 5, (tokens, heads), generator=g) / 2,
        index_keys=keys.view(blocks, per_block, KeyFormat.MXFP4.width),
        block_table=torch.randperm(blocks, generator=g).int()[None],
        token_request=torch.zeros(tokens, dtype=torch.int32),
        positions=torch.tensor(positions),
        rope=rope(context),
        ratio=ratio,
        top=top,
    )
