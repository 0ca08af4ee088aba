"""KV entries of DeepSeek-V4.1 in the formats of training: window entries in FP8, compressed entries in FP4 (SPEC 11.4).

| format | bytes per entry | content |
| --- | --- | --- |
| FP8 | 528 | 512 e4m3, RoPE dims included; 16 ue8m0 scales, one per 32 |
| FP4 | 288 | 256 B of e2m1 pairs, element 2i in the low nibble; 32 e4m3 scales, one per 16 |
"""

from __future__ import annotations

from torch import Tensor

from dsv4_sglang.formats.buffers import StorageFormat
from dsv4_sglang.formats.index_keys import dequantise_fp4, quantise_nvfp4
from dsv4_sglang.formats.kv_entries import ENTRY_DIM, e4m3_values, exp2_of_biased, quantise_e4m3


class V41KVFormat(StorageFormat):
    """Storage format of a 512-dim KV entry."""

    # Window entry.
    FP8 = "fp8", ENTRY_DIM, ENTRY_DIM // 32
    # Compressed entry.
    FP4 = "fp4", ENTRY_DIM // 2, ENTRY_DIM // 16

    @property
    def values_per_scale(self) -> int:
        return ENTRY_DIM // self.scale_bytes

    def quantise(self, values: Tensor) -> tuple[Tensor, ...]:
        if self is V41KVFormat.FP4:
            return quantise_nvfp4(values)
        codes, exponents = quantise_e4m3(values.unflatten(-1, (-1, self.values_per_scale)))
        return codes.flatten(-2), exponents

    def dequantise(self, data: Tensor, *scales: Tensor) -> Tensor:
        if self is V41KVFormat.FP4:
            return dequantise_fp4(data, scales[0])
        values = e4m3_values(data).unflatten(-1, (-1, self.values_per_scale))
        return (values * exp2_of_biased(scales[0]).unsqueeze(-1)).flatten(-2)
