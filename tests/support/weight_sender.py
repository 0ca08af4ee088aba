"""Send a weight twice to a server in a process group, as a trainer does: zeros, then the checkpoint's values.

Arguments: checkpoint folder, name of the weight, port, name of the group. server_forkserver.py runs this module.
"""

import sys
from pathlib import Path

import torch
from safetensors import safe_open
from sglang.srt.utils import init_custom_process_group


def weight(model: Path, name: str) -> torch.Tensor:
    """Return a weight of a checkpoint in fp32."""
    for file in model.glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            if name in weights.keys():  # noqa: SIM118  `in` needs keys
                return weights.get_tensor(name).float()
    raise KeyError(name)


if __name__ == "__main__":
    model, name, port, group_name = sys.argv[1:]
    value = weight(Path(model), name)
    group = init_custom_process_group(
        backend="gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=2, rank=0, group_name=group_name
    )
    for sent in (torch.zeros_like(value), value):
        torch.distributed.broadcast(sent, src=0, group=group)
