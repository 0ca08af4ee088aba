"""Reference models that tests and benchmarks compare servers with: transformers' in fp32, and the draft models."""
