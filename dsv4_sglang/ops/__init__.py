"""`torch.ops.dsv4_sglang.*`. Importing this package defines the ops and their CPU implementations.

CUDA implementations come from three places: `ops.extension.load` loads the compiled ones, `ops.cuda_index` registers
`index_topk`, which calls them, and `attention.cuda_ops` registers those in Triton and FlashMLA.
"""

from dsv4_sglang.ops import cuda_index, reference, schemas

__all__ = ["cuda_index", "reference", "schemas"]
