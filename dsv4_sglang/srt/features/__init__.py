"""Sleep, disaggregation, integrity check and collective operations."""
