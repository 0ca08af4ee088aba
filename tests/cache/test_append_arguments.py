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
from dsv4_sglang.cache.v41_step import V41LayerWeights, V41Step
from dsv4_sglang.model.v41 import Csa2Role
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
    schema = SimpleNamespace(
        ratio="ratio", kv_format=SimpleNamespace(code="kv_format"), key_format=SimpleNamespace(code="key_format")
    )
    append_layer(schema, named(LayerTables), named(LayerWeights), named(Projections), named(StepMetadata), "window")
    assert calls["append"] == NAMES["append"]


def test_v41_step_passes_the_arguments_of_the_schemas(calls):
    kv = torch.zeros(1, 512)
    step = SimpleNamespace(
        schedule=[SimpleNamespace(role=Csa2Role.FULL, ratio="ratio")],
        state=SimpleNamespace(ring=lambda layer: "ring", compressor_state=lambda layer: "compressor_state"),
        pools=[SimpleNamespace(entries="entries")],
        metadata=named(StepMetadata),
        _window="window",
        _owner=lambda spec: SimpleNamespace(index_keys="index_keys"),
    )
    latents = V41Step.append(step, 0, named(V41LayerWeights), kv, "compressor")
    V41Step.append_keys(step, 0, named(V41LayerWeights), "keys")
    tensors = {id(kv): "kv", id(latents): "latents"}
    assert [tensors.get(id(argument), argument) for argument in calls["append_v41"]] == NAMES["append_v41"]
    assert calls["append_v41_keys"] == NAMES["append_v41_keys"]


@pytest.mark.parametrize("record", [Projections, LayerWeights, LayerTables])
def test_fields_have_the_order_of_the_schema(record):
    order = [name for name in NAMES["append"] if name in record.__annotations__]
    assert list(record.__annotations__) == order


@pytest.mark.parametrize("op", REFERENCES)
def test_reference_implementations_have_the_parameters_of_the_schema(op):
    assert list(inspect.signature(REFERENCES[op]).parameters) == NAMES[op]
