"""Cases of the attention benchmark, and the inputs that all subjects share."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from benchmarks import tables
from dsv4_sglang.model.config import DSV4Config
from dsv4_sglang.model.geometry import CSA_RATIO
from dsv4_sglang.model.rope import rope_frequencies
from dsv4_sglang.ops.rope import rope_table

PREFILL_LAYERS = 4
DIM, BLOCK = 512, 128
SCALE = DIM**-0.5
# Entries of a KV buffer. Longer contexts in large batches share entries, which random accesses do not notice.
MOST_ROWS = 1 << 21


@dataclasses.dataclass(frozen=True)
class Case:
    """`batch` requests of `context` tokens that decode one token each, or one request with `chunk` new tokens."""

    model: str
    heads: int
    top_k: int
    kind: str
    batch: int
    context: int
    chunk: int = 0

    @property
    def tokens(self) -> int:
        return self.chunk or self.batch

    @property
    def layers(self) -> int:
        """Number of layers that are measured together."""
        if self.chunk:
            return PREFILL_LAYERS
        config = DSV4Config.flash() if self.model == "flash" else DSV4Config.pro()
        return sum(config.ratio(layer) == self.ratio for layer in range(config.num_hidden_layers))

    @property
    def ratio(self) -> int:
        return CSA_RATIO if self.kind == "csa" else BLOCK

    @property
    def name(self) -> str:
        work = f"prefill {self.chunk}" if self.chunk else f"decode x {self.batch}"
        return f"{self.model}/{self.kind}/{self.context // 1024}K/{work}"

    def lengths(self) -> Tensor:
        """Return the compressed entries that each token attends to, [tokens]."""
        last = (
            torch.arange(self.context - self.chunk, self.context)
            if self.chunk
            else torch.full((self.batch,), self.context - 1)
        )
        seen = (last + 1) // self.ratio
        return seen.clamp(max=self.top_k) if self.kind == "csa" else seen

    @property
    def width(self) -> int:
        """Columns of the list of compressed entries, a multiple of 64."""
        most = self.top_k if self.kind == "csa" else self.context // self.ratio
        return math.ceil(max(most, 1) / 64) * 64

    def rows_read(self) -> int:
        window = (torch.arange(self.context - self.tokens, self.context) + 1).clamp(max=128) if self.chunk else None
        return int(self.lengths().sum()) + (int(window.sum()) if window is not None else 128 * self.batch)

    def bytes_moved(self) -> int:
        """Return the bytes of one layer. Decode reads the entries of each token separately; the tokens of a prefill
        chunk share theirs, so each distinct entry counts once."""
        io = 2 * self.tokens * self.heads * DIM * 2
        if not self.chunk:
            return self.rows_read() * (tables.ROW + tables.SCALES) + io
        return (self.chunk + 127 + self.context // self.ratio) * (tables.ROW + tables.SCALES) + io

    def products(self) -> int:
        """Return the floating-point operations of q k and p v."""
        return 4 * DIM * self.heads * self.rows_read()


def random_lists(case: Case, rows: int, device: torch.device, layers: int) -> list[Tensor]:
    """Return ascending random entry indices: a different selection for each CSA layer, one for all HCA layers.

    Args:
        case: the step.
        rows: entries of the KV buffer.
        device: device of the lists.
        layers: number of lists.

    Returns:
        For each layer [tokens, width] int32.
    """
    generator = torch.Generator(device=device).manual_seed(5)
    shape = (case.tokens, case.width)

    def draw() -> Tensor:
        return torch.randint(0, rows, shape, device=device, generator=generator, dtype=torch.int32).sort(1).values

    return [draw() for _ in range(layers)] if case.kind == "csa" else [draw()] * layers


class Tensors:
    """Queries, sink, positions and RoPE table that all subjects share."""

    def __init__(self, case: Case, device: torch.device, layers: int) -> None:
        generator = torch.Generator(device=device).manual_seed(6)
        shape = (case.tokens, case.heads, DIM)
        self.q = [torch.randn(shape, device=device, generator=generator).bfloat16() for _ in range(layers)]
        self.sink = torch.randn(case.heads, device=device, generator=generator)
        config = DSV4Config.flash()
        last = case.context
        self.rope = rope_table(last, rope_frequencies(config, case.ratio, device))
        first = last - case.chunk if case.chunk else last - 1
        self.positions = (
            torch.arange(first, last, device=device) if case.chunk else torch.full((case.batch,), first, device=device)
        )
