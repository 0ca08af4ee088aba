"""Tests of the lifecycle fuzzer's operations. tests/server plays them on real servers."""

from __future__ import annotations

import itertools

from dsv4_sglang.cli.check import ANSWER_TOKENS
from support import lifecycle


def test_prompts_and_answers_fit_the_context() -> None:
    """This includes a request that continues the longest answer of the previous burst. A seed gives one list."""
    again = [list(itertools.islice(lifecycle.bursts(seed, lifecycle.Shape()), 4)) for seed in (3, 3, 4)]
    assert again[0] == again[1] != again[2]
    driver = lifecycle.Driver("http://127.0.0.1:9", seed=3, shape=lifecycle.Shape(context=700, burst=40))
    for burst in itertools.islice(lifecycle.bursts(3, driver.shape), 8):
        prompts = driver.prompts(burst)
        assert prompts == driver.prompts(burst)
        for ask in burst.asks:
            assert len(prompts[ask.number]) > 0 and len(prompts[ask.number]) + ask.count < 700
            assert len(prompts[ask.number]) + ANSWER_TOKENS <= 700 - lifecycle.SPARED, "not to be compared"
        driver.texts = {ask.number: prompts[ask.number] + [5] * ask.count for ask in burst.asks}
        goes_on = [ask for ask in burst.asks if ask.base is not None and ask.kept == 1.0 and ask.base in prompts]
        assert any(prompts[ask.number][: len(prompts[ask.base])] == prompts[ask.base] for ask in goes_on)
