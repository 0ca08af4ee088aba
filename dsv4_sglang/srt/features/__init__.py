"""Sleep, disaggregation, integrity audit and control requests of a running server."""
