"""Run every op of the extension on small inputs for compute-sanitizer: all kinds and phases of append, and others."""

import sys
from pathlib import Path

import torch

# The program runs without pytest, which would add the folder of the tests.
sys.path.append(str(Path(__file__).parents[1]))
from support.attention_cases import index_case
from support.candidate_cases import candidate_case
from support.kernel_cases import DEVICE, FORMATS, KINDS, Layer, Step, ops
from test_append_swa_cuda import Ring, rows
from test_append_v41_cuda import Case

from dsv4_sglang.attention import cuda_ops
from dsv4_sglang.formats import KeyFormat
from dsv4_sglang.model.geometry import state_rows
from dsv4_sglang.ops import cuda_index

DECODE = [(0, 0, 1), (1, 3, 1), (-1, 0, 1), (2, 127, 1), (3, 131, 1)]
VERIFY = [(slot, length, 4) for slot, length, _ in DECODE]
PREFILL = [(0, 0, 5), (1, 126, 131), (-1, 0, 2), (2, 5, 3), (3, 130, 260)]


def main() -> None:
    op = ops()
    for kind in KINDS:
        for formats in (FORMATS[0], FORMATS[2]):
            for requests, decode in ((DECODE, True), (PREFILL, False)):
                layer = Layer(kind, *formats, slots=8, blocks=16)
                Step.make(layer, requests, decode).run(op, layer.on(DEVICE))
            if kind == "hca-raw":
                continue
            drafting = Layer(kind, *formats, slots=8, blocks=16, sizes=state_rows(4))
            for requests, decode in ((VERIFY, True), (PREFILL, False)):
                Step.make(drafting, requests, decode).run(op, drafting.on(DEVICE))
    for ratio in (0, 1, 2):
        for requests, decode, draft_tokens in ((DECODE, True, 0), (VERIFY, True, 4), (PREFILL, False, 0)):
            case = Case(ratio, requests, decode, draft_tokens)
            case.run(op, *case.on(DEVICE))
    Ring.make(4).on(DEVICE).append(op, rows(200), torch.arange(200) % 3, torch.arange(200))
    state = [torch.randn(3, 5, 4000, device=DEVICE), torch.randn(1, 5, device=DEVICE)]
    op.copy_state(*(torch.tensor(i, dtype=torch.int32, device=DEVICE) for i in ([0, 1, -1], [3, 4, 2])), state)
    table = torch.arange(2 * 3000, dtype=torch.int32, device=DEVICE).view(2, 3000)
    ints = [torch.tensor(i, device=DEVICE) for i in ([1, 0], [2999, 129])]
    op.gather_tables(*ints, table[0, :2].clone(), table, table.new_zeros(3), table.new_zeros(3, 64))
    host = torch.zeros(30, 1168 + 24, dtype=torch.uint8).pin_memory()
    device = torch.zeros(30, 1168, dtype=torch.uint8, device=DEVICE)
    for to_host in (True, False):
        op.swap_blocks([device], host, torch.randperm(30, device=DEVICE)[:12], torch.randperm(30)[:12], to_host, [24])
    one_token = [(4 * n + 1, 4 * n + 2) for n in (0, 1, 511, 513, 4100)]
    chunk, verify = [(0, 9), (2050, 2090)], [(2200 + i, 2204 + i) for i in range(16)]
    for lens, slices in ((one_token, 5), (chunk, 16), (verify, 64)):
        for key_format, q_dtype in ((KeyFormat.MXFP4, torch.bfloat16), (KeyFormat.FP32, torch.float32)):
            case = index_case(lens=lens, heads=64, top=512, q_dtype=q_dtype, key_format=key_format)
            cuda_index.index_topk(*case.args(DEVICE, slices=slices))
    for ratio, slices in ((1, 64), (2, 30)):
        found = candidate_case(lens=[(1977, 2020), (0, 3), (5000, 5004)], ratio=ratio, top=64)
        found.check(cuda_ops.index_topk, 8, 100, DEVICE, slices)
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()
