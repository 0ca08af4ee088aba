"""What a server does with requests that make no sense, and when one of its processes ends."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.server

CONTEXT = 1024
FLAGS = ("--dtype", "float32", "--context-length", str(CONTEXT), "--max-running-requests", "4", "--enable-metrics")
FLAGS += ("--max-total-tokens", "4096", "--chunked-prefill-size", "256")
OPTIONS = {"entry_format": "fp32", "indexer_format": "fp32", "max_checkpoints": 12}
ASKED = {"max_new_tokens": 2, "temperature": 0}
