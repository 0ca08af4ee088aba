"""`torch.ops.dsv4_sglang.*`: importing this package defines the ops and their CPU implementations.

CUDA implementations come from three places. `ops.extension.load` loads the compiled ones, `ops.cuda_index` registers
`index_topk`, which calls them, and `attention.cuda_ops` registers those that Triton and FlashMLA serve.
"""

from dsv4_sglang.ops import cuda_index, reference, schemas

__all__ = ["cuda_index", "reference", "schemas"]
