"""What serves a model without a GPU."""
