"""The ops that append to the cache take their arguments by position. These tests compare the order with the schemas.

Each field of the records holds its own name, so the arguments of a call are the names of the fields that it passes.
"""

import inspect
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from dsv4_sglang.cache.append import LayerTables, LayerWeights, Projections, append_layer
from dsv4_sglang.cache.step import StepMetadata
from dsv4_sglang.formats import KeyFormat, KVFormat
from dsv4_sglang.ops.reference import append as append_reference
from dsv4_sglang.ops.reference import append_v41 as append_v41_reference

REFERENCES = {
    "append": append_reference.append,
    "append_v41": append_v41_reference.append_v41,
    "append_v41_keys": append_v41_reference.append_v41_keys,
}
NAMES = {
    op: [argument.name for argument in getattr(torch.ops.dsv4_sglang, op).default._schema.arguments]
    for op in REFERENCES
}


def named(record):
    """Make a record whose fields hold their own names."""
    known = record._fields if hasattr(record, "_fields") else [field.name for field in fields(record)]
    return record(**{name: name for name in known})


@pytest.fixture
def calls(monkeypatch) -> dict[str, list]:
    """Record the arguments of each op by its name."""
    made: dict[str, list] = {}
    for op in REFERENCES:
        monkeypatch.setattr(torch.ops.dsv4_sglang, op, lambda *args, op=op: made.update({op: list(args)}))
    return made


def test_append_layer_passes_the_arguments_of_the_schema(calls):
    spec = SimpleNamespace(ratio="ratio", ring_format=KVFormat.FP8, key_format=KeyFormat.FP32)
    append_layer(spec, named(LayerTables), named(LayerWeights), named(Projections), named(StepMetadata), "window")
    codes = {KVFormat.FP8.code: "kv_format", KeyFormat.FP32.code: "key_format"}
    assert [codes.get(argument, argument) for argument in calls["append"]] == NAMES["append"]


def test_append_layer_passes_the_arguments_of_the_schemas_of_v41(calls):
    spec = SimpleNamespace(ratio="ratio", ring_format=KVFormat.MXFP8)
    kv, given = torch.zeros(1, 512), []
    records = named(LayerTables), named(LayerWeights), Projections(kv, "kv_score"), named(StepMetadata), "window"
    append_layer(spec, *records, lambda latents: given.append(latents) or "keys")
    tensors = {id(kv): "kv", id(given[0]): "latents"}
    assert [tensors.get(id(argument), argument) for argument in calls["append_v41"]] == NAMES["append_v41"]
    assert calls["append_v41_keys"] == NAMES["append_v41_keys"]


@pytest.mark.parametrize("record", [Projections, LayerWeights, LayerTables])
def test_fields_have_the_order_of_the_schema(record):
    order = [name for name in NAMES["append"] if name in record.__annotations__]
    assert list(record.__annotations__) == order


@pytest.mark.parametrize("op", REFERENCES)
def test_reference_implementations_have_the_parameters_of_the_schema(op):
    assert list(inspect.signature(REFERENCES[op]).parameters) == NAMES[op]
