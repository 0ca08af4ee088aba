"""Call every op after a kernel has failed, and print what each raises, one line per op.

Run this in its own process, because the failure makes the GPU unusable for the process.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import triton
import triton.language as tl
from support.kernel_cases import DEVICE, Layer, Step, ops
from test_append_swa_cuda import Ring, rows
from test_append_v41_cuda import Case

from dsv4_sglang.ops import cuda_index

sys.path.append(str(Path(__file__).parents[1]))
from support.attention_cases import index_case

DECODE = [(0, 0, 1), (1, 3, 1)]


@triton.jit
def write_nowhere(address):
    tl.store(address.to(tl.int64).to(tl.pointer_type(tl.int32)), 1)


def calls() -> dict[str, Callable[[], object]]:
    """Return a call of each op, by name. All tensors that the calls use are already on the device."""
    op = ops()
    layer = Layer("csa", slots=4, blocks=4)
    step, layer = Step.make(layer, DECODE, True), layer.on(DEVICE)
    batch, inputs, window = step.on(DEVICE)
    ring = Ring.make(2).on(DEVICE)
    kv, zeros = rows(2).to(DEVICE), torch.zeros(2, dtype=torch.int32, device=DEVICE)
    case = Case(1, DECODE, decode=True)
    read, written = case.on(DEVICE)
    pair = zeros[:1], zeros[:1] + 1
    table = torch.zeros(4, 300, dtype=torch.int32, device=DEVICE)
    pool = torch.zeros(8, 64, device=DEVICE)
    block, host = torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.zeros(8, 256, dtype=torch.uint8).pin_memory()
    row = torch.zeros(1, dtype=torch.int64)
    arguments = index_case(lens=[(4100, 4101)], heads=64, top=512).args(DEVICE)
    return {
        "append": lambda: Step.call(op, layer, batch, inputs, window),
        "append_swa": lambda: ring.append(op, kv, zeros, zeros),
        "append_v41": lambda: case.append(op, read, written),
        "append_v41_keys": lambda: case.append_keys(op, read, written),
        "copy_state": lambda: op.copy_state(*pair, [layer.tables["ring"][None]]),
        "gather_tables": lambda: op.gather_tables(block, block, zeros, table, zeros, table),
        "swap_blocks": lambda: op.swap_blocks([pool], host, block, row, True, [0]),
        "index_query": lambda: cuda_index.index_topk(*arguments),
    }


def main() -> None:
    found = calls()
    for call in found.values():
        call()
    torch.cuda.synchronize()
    write_nowhere[(1,)](64)
    for name, call in {"synchronize": torch.cuda.synchronize, **found}.items():
        try:
            call()
            raised = "nothing"
        except RuntimeError as error:
            raised = str(error).splitlines()[0]
        print(f"{name} raises {raised}", flush=True)


if __name__ == "__main__":
    main()
