"""SGLang's CUDA graphs."""

from __future__ import annotations

from typing import Any


def attention_backend(graphs: Any) -> Any:
    """Return the attention backend of the steps in SGLang's `BreakableCudaGraphBackend`."""
    return graphs._model_runner.attn_backend
