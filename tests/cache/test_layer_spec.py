"""Tests of the entries that the layers of a model attend to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4_sglang.attention.step_buffers import DecodeBuffers
from dsv4_sglang.cache.layer_spec import LayerKVSpec, Selection, entry_limits, source_of
from dsv4_sglang.cache.schema import v4_specs
from dsv4_sglang.cache.specs_v41 import v41_specs
from dsv4_sglang.model import AttentionType, DSV4Config, build_schedule
from dsv4_sglang.model.v41 import V41Config

V4: tuple[LayerKVSpec, ...] = v4_specs(DSV4Config.flash(), build_schedule(DSV4Config.flash()))
V41 = v41_specs(V41Config.flash())


def test_limits_of_the_released_models() -> None:
    assert entry_limits(V4, 512) == {4: 512, 128: None}
    assert entry_limits(V41, 512) == {2: 512, 1: 512}
    assert entry_limits(V4[:2], 512) == {}
    assert [source_of(V4, layer) for layer in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([replace(V4[2], selection=Selection.ALL)], "layer 0 reads all entries of ratio 4; expected ratio 128"),
        (
            [V4[3], replace(V4[3], selection=Selection.TOP_K)],
            "layer 1 reads at most 512 entries of ratio 128, an earlier layer all; a step has one length",
        ),
    ],
)
def test_reads_without_a_list_are_rejected(specs: list[LayerKVSpec], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        entry_limits(specs, 512)


def test_three_ratios_and_two_limits_are_rejected() -> None:
    device = torch.device("cpu")
    DecodeBuffers(1, 1, device, limits={kind.ratio: 8 for kind in (AttentionType.PAIR, AttentionType.SINGLE)})
    with pytest.raises(ValueError, match=r"entries of the ratios \[1, 2, 4\]; expected at most two"):
        DecodeBuffers(1, 1, device, limits={1: 8, 2: 8, 4: 8})
    with pytest.raises(ValueError, match=r"at most \[8, 9\] entries; expected one limit"):
        DecodeBuffers(1, 1, device, limits={1: 8, 2: 9})
