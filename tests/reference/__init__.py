"""Reference models that servers are compared with: transformers' in fp32, and the draft models."""
