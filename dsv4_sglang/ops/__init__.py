"""`torch.ops.dsv4_sglang.*`: importing this package defines the ops and their CPU implementations."""

from dsv4_sglang.ops import reference, schemas

__all__ = ["reference", "schemas"]
