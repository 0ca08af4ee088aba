"""`torch.ops.dsv4_sglang.*`. Importing this package defines the ops and their CPU implementations.

CUDA implementations come from two places: `ops.extension.load` loads the compiled ones, and `attention.cuda_ops`
registers the ops that read the cache.
"""

from dsv4_sglang.ops import reference, schemas

__all__ = ["reference", "schemas"]
