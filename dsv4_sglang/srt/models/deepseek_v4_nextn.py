"""DeepSeek-V4's MTP block as SGLang builds it for a draft model (NextN), with its attention replaced.

The block has a sliding window only. In the cache it is a layer after the last one of the served model.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.models import deepseek_v4_nextn as in_tree

from dsv4_sglang.srt.models.layers import DecoderLayer
from dsv4_sglang.srt.sglang.models import replaced


class DeepseekV4ForCausalLMNextN(in_tree.DeepseekV4ForCausalLMNextN):
    """The draft model that SGLang loads. It has the same architecture name and weight names as SGLang's class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with replaced(in_tree, DeepseekV4DecoderLayer=DecoderLayer):
            super().__init__(*args, **kwargs)


EntryClass = DeepseekV4ForCausalLMNextN
