"""Bytes and dtypes of a checkpoint on disk, from the headers of its safetensors files. No tensor is read."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

INDEX = "model.safetensors.index.json"


class StoredTensor(NamedTuple):
    name: str
    dtype: str  # safetensors' name, such as BF16, F8_E4M3 or I8
    bytes: int


def stored_tensors(folder: Path) -> Iterator[StoredTensor]:
    """Yield every tensor of the safetensors files in `folder`.

    Raises:
        ValueError: a file is not a safetensors file.
    """
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with file.open("rb") as stream:
                (length,) = struct.unpack("<Q", stream.read(8))
                header = json.loads(stream.read(length))
        except (struct.error, UnicodeDecodeError, json.JSONDecodeError, OverflowError, MemoryError):
            raise ValueError(f"{file} is not a safetensors file: its header cannot be read") from None
        for name, tensor in header.items():
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                yield StoredTensor(name, tensor["dtype"], end - begin)


def expert_dtype(folder: Path) -> str | None:
    """Return the dtype of the routed experts' weights, or None if `folder` has no weights."""
    for tensor in stored_tensors(folder):
        if ".experts." in tensor.name and tensor.name.endswith(".weight"):
            return tensor.dtype
    return None


def stored_bytes(folder: Path) -> int | None:
    """Return the bytes of all tensors, from the headers or else from the index; None without either."""
    if sizes := [tensor.bytes for tensor in stored_tensors(folder)]:
        return sum(sizes)
    if not (index := folder / INDEX).is_file():
        return None
    total = json.loads(index.read_text()).get("metadata", {}).get("total_size")
    return None if total is None else int(total)
