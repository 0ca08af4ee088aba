"""Tests of csrc/numeric.h and csrc/index/layout.h compiled for the host: roundings and scales give torch's bytes for
every bf16 and at every tie, decoded keys are exact, and the order of scores is preserved. Every constant of
csrc/entries.h and csrc/geometry.h equals its Python twin."""

import ctypes
import re
import subprocess

import pytest
import torch

from dsv4_sglang.formats import V4_KV_FORMATS, KeyFormat, KVFormat, index_keys, kv_entries, quantise
from dsv4_sglang.model import geometry
from dsv4_sglang.ops import extension

WRAPPER = """
#include "numeric.h"
#include "geometry.h"
#include "index/layout.h"
#include "entries.h"
using namespace dsv4;
#define EACH(name, expression) \\
  extern "C" void name(const float* x, float* y, long n) { for (long i = 0; i < n; ++i) y[i] = float(expression); }
EACH(host_round_bf16, round_bf16(x[i]))
EACH(host_e4m3, e4m3(x[i]))
EACH(host_e4m3_high, e4m3_pair(0.0f, x[i]) >> 8)
EACH(host_e4m3_value, e4m3_value(uint32_t(x[i])))
EACH(host_e2m1, e2m1(x[i]))
EACH(host_round_e2m1, round_e2m1(x[i]))
EACH(host_row_exponent, row_exponent(x[i]))
EACH(host_mxfp4_exponent, mxfp4_exponent(x[i]))
EACH(host_mxfp4_exponent_of_bf16, mxfp4_exponent_of_bf16(bits_of(x[i]) >> 16))
EACH(host_nvfp4_scale, nvfp4_scale(x[i]))
EACH(host_e2m1_value, e2m1_value(uint32_t(x[i])))
EACH(host_channel_at, channel_at(int(x[i])))
#define IN_IMAGE(heads) word_in_image(heads, int(x[i]) / 64, int(x[i]) / 16 % 4, int(x[i]) / 2 % 8, int(x[i]) % 2)
EACH(host_word_in_image_64, IN_IMAGE(64))
EACH(host_word_in_image_32, IN_IMAGE(32))
EACH(host_pack_low, low_bf16(pack_bf16(x[i], -1.0f)))
EACH(host_pack_high, high_bf16(pack_bf16(-1.0f, x[i])))
extern "C" int host_csa_compressor_states() { return sizeof(kCsaCompressorStates) / sizeof(kCsaCompressorStates[0]); }
extern "C" void host_csa_compressor_state(int i, int* y) {
  const CsaCompressorState& compressor_state = kCsaCompressorStates[i];
  y[0] = compressor_state.current, y[1] = compressor_state.previous;
  y[2] = rows_of(compressor_state), y[3] = draft_tokens_of(compressor_state);
}
extern "C" int host_draft_tokens_of_ring(int rows) { return draft_tokens_of_ring(rows); }
extern "C" int host_draft_tokens_of_state_copies(int copies) { return draft_tokens_of_state_copies(copies); }
extern "C" int host_row_width(int format) { return row_width(KVFormat(format)); }
extern "C" int host_key_width(int format) { return key_width(KeyFormat(format)); }
// Eight codes and two scales a row -> eight products with the first scale, then with the second, as the codes lie.
extern "C" void host_decode_keys(const uint8_t* rows, float* y, long n) {
  for (long i = 0; i < n; ++i, rows += 6, y += 16) {
    uint32_t word;
    std::memcpy(&word, rows, 4);
    const __half2 scales = decode_scales(rows[4] | rows[5] << 8);
    __half2 codes[4];
    decode_codes(word, codes);
    for (int j = 0; j < 8; ++j) {
      const float code = j < 4 ? __low2float(codes[j]) : __high2float(codes[j - 4]);
      y[j] = code * __low2float(scales) * kKeyGain, y[8 + j] = code * __high2float(scales) * kKeyGain;
    }
  }
}
extern "C" void host_score_of_order(const float* x, float* y, long n) {
  for (long i = 0; i < n; ++i) y[i] = score_of(order_of(x[i]));
}
// A word of eight codes -> as e4m3 numbers, of a block whose scale is 2^-below times the largest.
extern "C" void host_decode_bytes(const uint32_t* words, const int32_t* below, float* y, long n) {
  for (long i = 0; i < n; ++i, y += 8) {
    uint32_t bytes[2];
    eight_bytes(words[i], byte_codes(below[i]), bytes);
    for (int j = 0; j < 8; ++j) {
      const uint32_t byte = bytes[j / 4] >> 8 * (j % 4) & 0xff;
      y[j] = e4m3_value(byte & 0x7f) * (byte & 0x80 ? -1 : 1);
    }
  }
}
extern "C" void host_order(const float* x, int64_t* y, long n) {
  for (long i = 0; i < n; ++i) y[i] = int64_t(order_of(order_of(x[i]), uint32_t(i)) ^ uint64_t(1) << 63);  // signed
}
"""


def constant_names() -> set[str]:
    """Return the names of the constants of entries.h and geometry.h."""
    headers = "".join((extension.source_dir() / name).read_text() for name in ("entries.h", "geometry.h"))
    enums = re.findall(r"enum \w+ : int \{([^}]*)\}", headers)
    return {*re.findall(r"constexpr int (k\w+)\b(?!\()", headers), *re.findall(r"k\w+", " ".join(enums))}


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """Return `host(name, x)`, which maps fp32 `x` to fp32 through a CPU build of numeric.h."""
    try:
        nvcc = extension.find_nvcc()
    except RuntimeError:
        pytest.skip("needs nvcc, which knows where CUDA's headers are")
    folder = tmp_path_factory.mktemp("numeric")
    constants = "".join(f'extern "C" const int constant_{name} = {name};\n' for name in constant_names())
    (folder / "wrapper.cpp").write_text(WRAPPER + constants)
    flags = ["-O1", "-std=c++17", "-shared", "-Xcompiler", "-fPIC,-ffp-contract=off", f"-I{extension.source_dir()}"]
    subprocess.run([nvcc, *flags, "wrapper.cpp", "-o", "wrapper.so"], cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "wrapper.so"))

    def call(name: str, x: torch.Tensor) -> torch.Tensor:
        x = x.float().contiguous()
        y = torch.empty_like(x)
        getattr(library, name)(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_long(x.numel()))
        return y

    call.library = library
    return call


def test_constants_equal_their_python_twins(host):
    """Covers all constants of entries.h and geometry.h: a new constant without a Python twin fails."""
    rows, v41_row, v41_entry = geometry.state_rows(0), KVFormat.MXFP8, KVFormat.NVFP4
    twins = {
        "kFp8": KVFormat.FP8.code,
        "kBf16": KVFormat.BF16.code,
        "kFp32": KVFormat.FP32.code,
        "kMxfp4": KeyFormat.MXFP4.code,
        "kNvfp4": KeyFormat.NVFP4.code,
        "kKeyFp32": KeyFormat.FP32.code,
        "kCsaCurrentRows": rows.csa.current,
        "kCsaPreviousRows": rows.csa.previous,
        "kV41RowBytes": v41_row.data_bytes,
        "kV41RowScales": v41_row.scale_bytes,
        "kV41EntryBytes": v41_entry.data_bytes,
        "kV41EntryScales": v41_entry.scale_bytes,
    }
    for module in (kv_entries, index_keys, geometry):  # kEntryDim is ENTRY_DIM
        names = {"k" + name.title().replace("_", ""): name for name in vars(module) if name.isupper()}
        twins |= {name: getattr(module, names[name]) for name in constant_names() & names.keys()}
    compiled = {name: ctypes.c_int.in_dll(host.library, f"constant_{name}").value for name in constant_names()}
    assert compiled == twins
    for kv_format in V4_KV_FORMATS:
        assert host.library.host_row_width(kv_format.code) == kv_format.width
    for key_format in KeyFormat:
        assert host.library.host_key_width(key_format.code) == key_format.width


def test_state_rows_allow_equal_drafts_on_both_sides(host):
    assert host.library.host_csa_compressor_states() == len(geometry.CSA_COMPRESSOR_STATES)
    for i, compressor_state in enumerate(geometry.CSA_COMPRESSOR_STATES):
        compiled = (ctypes.c_int * 4)()
        host.library.host_csa_compressor_state(i, compiled)
        assert list(compiled) == [*compressor_state, compressor_state.rows, compressor_state.draft_tokens]
    for d in range(2, geometry.MAX_DRAFT_TOKENS + 1):
        rows = geometry.state_rows(d)
        assert d <= host.library.host_draft_tokens_of_ring(rows.ring) == rows.ring - 127
        assert host.library.host_draft_tokens_of_state_copies(rows.hca_state_copies) == d
    assert host.library.host_draft_tokens_of_ring(128) == host.library.host_draft_tokens_of_state_copies(1) == 1


def all_bf16() -> torch.Tensor:
    """Return every finite bf16 as fp32."""
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16).float()
    return x[x.isfinite()]


def random_floats() -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    return torch.randn(200_000, generator=g) * 2.0 ** torch.randint(-30, 12, (200_000,), generator=g)


@pytest.mark.parametrize("name", ["host_round_bf16", "host_pack_low", "host_pack_high"])
def test_bf16(host, name):
    x = torch.cat([all_bf16(), random_floats(), all_bf16() * (1 + 2.0**-8)])
    assert torch.equal(host(name, x), x.bfloat16().float())


@pytest.mark.parametrize("name", ["host_e4m3", "host_e4m3_high"])
def test_e4m3(host, name):
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[1:] + codes[:-1]) / 2
    x = torch.cat([all_bf16(), random_floats(), codes, ties, ties * (1 + 2.0**-20), ties * (1 - 2.0**-20)])
    x = torch.cat([x, -x])
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).float()
    assert torch.equal(host(name, x), expected)
    assert torch.equal(host("host_e4m3_value", torch.arange(127)), codes)


def test_e2m1(host):
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    x = torch.cat([all_bf16(), random_floats(), ties, ties * (1 + 2.0**-20), ties * (1 - 2.0**-20)])
    x = torch.cat([x, -x])
    codes = host("host_e2m1", x)
    assert torch.equal(codes, quantise.e2m1_codes(x).float())
    assert torch.equal(host("host_round_e2m1", x), host("host_e2m1_value", codes))
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    assert torch.equal(host("host_e2m1_value", torch.arange(16)), torch.cat([values, -values]))


def test_entries_are_quantised_from_bf16():
    """fp32 values that bf16 rounds across a tie of e4m3, or across a power of two."""
    x = torch.randn(1000, 448, generator=torch.Generator().manual_seed(0))
    for got, expected in zip(quantise.quantise_e4m3(x), quantise.quantise_e4m3(x.bfloat16())):
        assert torch.equal(got, expected)
    assert (x != x.bfloat16()).any()


def test_the_hadamard_transform_is_orthonormal():
    x = torch.randn(50, 128, generator=torch.Generator().manual_seed(0))
    y = index_keys.hadamard(x)
    torch.testing.assert_close(index_keys.hadamard(y), x)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(y[:, 0], x.sum(-1) / 128**0.5)


def test_exponent_of_a_row(host):
    x = all_bf16()
    x = x[(x >= 0) & (x < 2.0**120)]
    expected = quantise.ceil_pow2_exponent(x.clamp_min(quantise.FP8_AMAX_FLOOR) * (1.0 / quantise.FP8_MAX))
    assert torch.equal(host("host_row_exponent", x), expected.float())


def test_non_finite_entries_have_scale_nan(host):
    """NaN of ue8m0 (255) and of e4m3 (0x7F): an entry with such a scale reads as NaN."""
    x = torch.tensor([float("nan"), -float("nan"), float("inf")])
    assert host("host_row_exponent", x).tolist() == [255] * 3
    assert quantise.ceil_pow2_exponent(x.abs()).tolist() == [255] * 3
    assert host("host_nvfp4_scale", x).tolist() == [127, 127, 126]
    assert host("host_e4m3", x).int().bitwise_and(127).tolist() == [127, 127, 126]


def test_scales_of_keys(host):
    x = all_bf16()
    x = x[(x >= 0) & (x < 2.0**100)]
    keys = torch.zeros(len(x), 128)
    keys[:, 5] = x
    for scale_format, name in ((KeyFormat.MXFP4, "host_mxfp4_exponent"), (KeyFormat.NVFP4, "host_nvfp4_scale")):
        _, scales = scale_format.quantise(keys)
        got = host(name, x)
        if scale_format is KeyFormat.MXFP4:
            got = host("host_e4m3", quantise.exp2_of_biased(got.int()))
        assert torch.equal(got, scales[:, 0].float())


def test_scales_of_queries(host):
    x = all_bf16()
    x = x[(x >= 6 * 2.0**-126) & (x <= 6 * 2.0**125)]
    expected = quantise.ceil_pow2_exponent(x * (1.0 / 6.0))
    assert torch.equal(host("host_mxfp4_exponent_of_bf16", x), expected.float())


def test_keys_are_decoded_exactly(host):
    """Test every scale with every code at every position of a word."""
    places = (torch.arange(16)[:, None] + torch.arange(8)) % 16
    packed = (places[:, 0::2] | places[:, 1::2] << 4).to(torch.uint8)
    scales = torch.stack([torch.arange(127), torch.arange(126, -1, -1)], 1).to(torch.uint8)
    rows_of_bytes = torch.cat([packed.repeat(127, 1), scales.repeat_interleave(16, 0)], 1).contiguous()
    got = torch.empty(len(rows_of_bytes), 16)
    pointers = ctypes.c_void_p(rows_of_bytes.data_ptr()), ctypes.c_void_p(got.data_ptr())
    host.library.host_decode_keys(*pointers, ctypes.c_long(len(got)))
    codes, factor = host("host_e2m1_value", places).repeat(127, 1), host("host_e4m3_value", scales)
    factor = factor.repeat_interleave(16, 0)
    assert torch.equal(got, torch.cat([codes * factor[:, :1], codes * factor[:, 1:]], 1))


def test_e4m3_keys_are_exact_over_12_scales(host):
    """Test every code at every position of a word. Smaller scales give 0."""
    places = (torch.arange(16)[:, None] + torch.arange(8)) % 16
    words = (places << 4 * torch.arange(8)).sum(1)
    below = torch.arange(18)
    arguments = words.repeat(18).to(torch.uint32), below.repeat_interleave(16).int()
    got = torch.empty(18 * 16, 8)
    host.library.host_decode_bytes(*(ctypes.c_void_p(t.data_ptr()) for t in (*arguments, got)), ctypes.c_long(len(got)))
    exact = host("host_e2m1_value", places) * 2.0 ** (6 - below)[:, None, None] * (below <= 11)[:, None, None]
    assert torch.equal(got.view(18, 16, 8), exact)


def test_channels_of_a_query(host):
    assert host("host_channel_at", torch.arange(16)).tolist() == [*(c := [0, 4, 1, 5, 2, 6, 3, 7]), *(8 + i for i in c)]


@pytest.mark.parametrize("heads", [64, 32])
def test_image_of_a_query(host, heads):
    """The image is the layout of operand B of warpgroup products with a 128-byte swizzle.

    Byte 128 n + k % 128 of each 128 bytes per head has address bits 7 to 9 XORed into bits 4 to 6. n is the head. k is
    the byte position of a word in the order of the steps (eight steps for fp16, four for e4m3).
    """
    head, c, step, upper = torch.meshgrid(*(torch.arange(n) for n in (heads, 4, 8, 2)), indexing="ij")
    k = 32 * step + 16 * upper + 4 * c
    byte = 128 * head + k % 128
    expected = (128 * heads * (k // 128) + (byte ^ (byte >> 7) % 8 * 16)) // 4
    assert torch.equal(host(f"host_word_in_image_{heads}", torch.arange(64 * heads)), expected.flatten().float())


def test_order_of_scores(host):
    """Ascending order keys list scores in ascending order, and later entries first among equal scores."""
    x = torch.cat([all_bf16(), random_floats(), torch.tensor([0.0, -0.0, 0.0, 1.0, -0.0, 1.0])])
    order = torch.empty(len(x), dtype=torch.int64)
    host.library.host_order(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(order.data_ptr()), ctypes.c_long(len(x)))
    expected = torch.sort(x, descending=True, stable=True).indices
    assert torch.equal(torch.sort(order, descending=True).indices, expected)
    assert torch.equal(host("host_score_of_order", x), x)
