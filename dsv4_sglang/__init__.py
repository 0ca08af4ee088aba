"""The hybrid KV cache of DeepSeek-V4 for SGLang.

`model` and `cache` are usable by themselves. `ops` registers `torch.ops.dsv4_sglang`. `srt` is the integration into
SGLang. Importing this package imports none of them.
"""

__version__ = "0.2.0"
