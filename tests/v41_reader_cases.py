"""Inputs of `attend_v41` with every corner in them, made on the CPU from a seed; `reader_cases` for V4.1's rows."""

from dataclasses import replace

import torch
from reader_cases import GARBAGE, AttendCase, attend_case
from torch import Tensor

from dsv4_sglang.formats import RowFormat
from dsv4_sglang.formats.v41_rows import V41RowFormat, V41Table
from dsv4_sglang.ops.reference import read_v41


class V41AttendCase(AttendCase):
    """Arguments of `attend_v41` in order."""

    def v41_args(self, device: torch.device | str = "cpu") -> tuple:
        return self.args(device)[:-1]

    def expected(self) -> Tensor:
        return read_v41.attend_v41(*self.v41_args())


def v41_table(blocks: int, per_block: int, stored: V41RowFormat, used: Tensor, g: torch.Generator) -> Tensor:
    """Random rows where `used`, else bytes of NaN or of the largest numbers, which no reader may let through. Channels
    and rows differ by powers of ten."""
    table = torch.full((blocks, per_block, stored.row_bytes), 0xFF, dtype=torch.uint8)
    if len(used):
        values = torch.randn(len(used), 512, generator=g)
        values[:, 300:310] *= 1e-2
        values[:, 480:] *= 8
        values *= 10.0 ** (torch.arange(len(used)) % 4 - 2)[:, None]
        values[0, :32] = 0
        V41Table(table, stored).write(used, values)
    return table


def v41_attend_case(*, per_block: int = 64, seed: int = 0, **given) -> V41AttendCase:
    """The lists of `attend_case`, of tables in V4.1's formats."""
    plain = attend_case(per_block=per_block, seed=seed, row_format=RowFormat.BF16, **given)
    g = torch.Generator().manual_seed(seed)

    def used(rows: Tensor) -> Tensor:
        return rows[(rows >= 0) & (rows < GARBAGE)].unique()

    window = v41_table(*plain.window.shape[:2], V41RowFormat.FP8, used(plain.window_rows), g)
    entries = None
    if plain.entries is not None:
        entries = v41_table(*plain.entries.shape[:2], V41RowFormat.FP4, used(plain.entry_rows), g)
    return V41AttendCase(**vars(replace(plain, window=window, entries=entries)))
