"""SGLang's CUDA graphs."""

from __future__ import annotations

from typing import Any


def backend_of_runner(runner: Any) -> Any:
    """Return the attention backend of the steps of SGLang's `PrefillCudaGraphRunner`."""
    return runner.model_runner.attn_backend


def attention_backend(graphs: Any) -> Any:
    """Return the attention backend of the steps in SGLang's `BreakableCudaGraphBackend`."""
    return graphs._model_runner.attn_backend
