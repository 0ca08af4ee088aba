"""Conversations through a small device pool: warm answers must have the same length as cold ones."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from server_harness import Generated, Server, assert_same, prompt

TURNS = 3
LONGEST = 32
# One token id of 16 ends an answer.
SAMPLING = {"max_new_tokens": LONGEST, "temperature": 0, "stop_token_ids": list(range(3, 384, 16))}


@dataclass
class Ends:
    """Lengths of the answers.

    Attributes:
        lengths: (cold, warm) length of each answer.
        parted: Number of warm answers that continued with a different token after a near tie.
        cached: Total number of cached tokens.
    """

    lengths: list[tuple[int, int]]
    parted: int = 0
    cached: int = 0


def ends_of(server: Server, conversations: int, tolerance: float, at_once: int = 4) -> Ends:
    """Run all conversations turn by turn, so that each is evicted between its turns.

    Every turn is requested twice, first cold and then warm. The conversation continues with the cold answer.

    Args:
        server: Server to ask.
        conversations: Number of conversations.
        tolerance: Maximum difference of log p between cold and warm answers.
        at_once: Number of concurrent requests.

    Returns:
        Lengths of the answers.
    """
    spoken = [prompt(200 + 7 * (i % 20), seed=1000 + i) for i in range(conversations)]
    ends = Ends([])
    for turn in range(TURNS):
        answers = []
        for fields in ({"extra_key": uuid.uuid4().hex}, {}):

            def ask(ids: list[int], fields: dict[str, str] = fields) -> Generated:
                return server.generate(ids, sampling_params=SAMPLING, **fields)

            with ThreadPoolExecutor(at_once) as pool:
                answers.append(list(pool.map(ask, spoken)))
        assert not any(cold.cached for cold in answers[0])
        for i, (cold, got) in enumerate(zip(*answers)):
            count = min(len(cold.tokens), len(got.tokens))
            same = cold.tokens[:count] == got.tokens[:count]
            if same:
                assert len(cold.tokens) == len(got.tokens), (i, turn, got.tokens)
            assert_same(Generated(got.tokens[:count], got.logprobs[:count], 0), cold, tolerance)
            ends.parted += not same
            ends.lengths.append((len(cold.tokens), len(got.tokens)))
            ends.cached += got.cached
            spoken[i] = [*spoken[i], *cold.tokens, *prompt(60, seed=2000 + 10 * i + turn)]
    return ends
