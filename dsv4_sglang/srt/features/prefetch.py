"""`POST /dsv4/prefetch`: load to the device what the host cache and its storage have of a prompt.

A prefetch is a request for no tokens, with the cached part of the prompt and one token more. SGLang fetches, loads and
admits it like any other request, so it evicts neither what runs nor what is pinned, and computes one token.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.io_struct import GenerateReqInput

from dsv4_sglang.srt.features.lookup import Prompt, find_on_ranks, ids_of


class Prefetch(Prompt):
    """Body of a request: a prompt, and the rank of DP attention that gets the next request with it.

    Without a rank, that is the one which has most of the prompt; of equal ones, the one that has most on the device,
    then the one that has most in host memory. All ranks share the storage.
    """

    routed_dp_rank: int | None = None


async def prefetch(manager: Any, given: Prefetch, request: Any) -> dict[str, Any]:
    """Return the answer to a body once the prompt is on the device.

    Raises:
        ValueError: the prompt or the rank is invalid.
    """
    ids = await ids_of(manager, given)
    ranks = {rank["dp_rank"]: rank for rank in await find_on_ranks(manager, ids, given, files=True)}
    if given.routed_dp_rank is None:
        chosen = max(ranks.values(), key=lambda rank: [rank[f"{of}_tokens"] for of in ("hit", "device", "host")])
    elif given.routed_dp_rank in ranks:
        chosen = ranks[given.routed_dp_rank]
    else:
        raise ValueError(f"routed_dp_rank is {given.routed_dp_rank}; expected one of {', '.join(map(str, ranks))}")
    cached = chosen["device_tokens"]
    if chosen["hit_tokens"] > cached:
        asked = GenerateReqInput(
            input_ids=ids[: chosen["hit_tokens"] + 1].tolist(),
            sampling_params={"max_new_tokens": 0},
            extra_key=given.extra_key or None,
            cache_salt=given.cache_salt or None,
            routed_dp_rank=chosen["dp_rank"] if len(ranks) > 1 else None,
        )
        async for answer in manager.generate_request(asked, request):
            cached = answer["meta_info"]["cached_tokens"]
    return {
        "prompt_tokens": len(ids),
        "dp_rank": chosen["dp_rank"],
        "device_tokens": cached,
        "loaded_tokens": cached - chosen["device_tokens"],
    }
