"""PyTorch implementations of all ops for CPU tensors: the oracle of the CUDA kernels, and the code for machines without
a GPU.
"""

from dsv4_sglang.ops.reference import append, append_v41, move, read

__all__ = ["append", "append_v41", "move", "read"]
