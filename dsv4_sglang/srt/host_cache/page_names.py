"""Names of a model's pages in a storage: everything that decides their bytes is part of the name."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from dsv4_sglang.cache.layout import CacheLayout
from dsv4_sglang.srt.host_cache.folder import PAGE_VERSION

log = logging.getLogger(__name__)

DUMMY = "dummy"
"""The load format of random weights."""
WEIGHT_FLAGS = (
    "revision",
    "dtype",
    "quantization",
    "tp_size",
    "weight_version",
    "load_format",
    "custom_weight_loader",
    "model_loader_extra_config",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "speculative_draft_load_format",
    "speculative_draft_model_quantization",
)
"""Fields of SGLang's ServerArgs that decide the weights, or how they are computed with."""
LABEL_CHARACTERS = 24
"""Length at which the readable part of a name is cut."""
SAMPLE_BYTES, SAMPLE_STEP = 4096, 1 << 20
"""What is read of a tensor: its first and last bytes, and as many bytes at each step between."""
KERNELS = 16


def page_name(model_name: str | None, layout: CacheLayout, row_bytes: Sequence[int], **facts: Any) -> str:
    """Return the name of a model's pages, of at most 99 characters.

    SGLang's keys of pages are hashes of tokens only; the name stands behind the key.

    Args:
        model_name: as the server is called.
        layout: of the cache, with its formats.
        row_bytes: bytes of a block and of a snapshot.
        facts: whatever else changes the bytes, such as `weight_facts`.
    """
    layers = [repr(schema) for schema in layout.schemas]
    described = [version("dsv4_sglang"), model_name, layers, list(row_bytes), facts]
    digest = hashlib.blake2b(json.dumps(described, default=str, sort_keys=True).encode(), digest_size=16)
    label = re.sub(r"[^A-Za-z0-9.-]", "-", Path(model_name or "model").name)[:LABEL_CHARACTERS]
    first = layout.schemas[0]
    formats = f"{first.kv_format.value}-{first.key_format.value}"
    return f"{label}-dsv4v{PAGE_VERSION}-{formats}-{digest.hexdigest()}"


def weight_facts(server_args: Any) -> dict[str, Any]:
    """Return what decides the weights of a server: flags, and a digest of the files of model and draft model."""
    facts = {field: getattr(server_args, field) for field in WEIGHT_FLAGS}
    if draws_weights(server_args):
        facts["random_seed"] = server_args.random_seed
    models = [(server_args.model_path, server_args.revision)]
    draft = server_args.speculative_draft_model_path
    if draft is not None and draft != server_args.model_path:
        models.append((draft, server_args.speculative_draft_model_revision))
    begin = time.monotonic()
    facts["files"] = [_digest_of_model(path, revision, server_args.download_dir) for path, revision in models]
    log.info("host cache: read samples of the weights for the names of pages in %.1f s", time.monotonic() - begin)
    return facts


def draws_weights(server_args: Any) -> bool:
    """Return True if weights of the model or its draft model are random."""
    return DUMMY in (server_args.load_format, server_args.speculative_draft_load_format)


def _digest_of_model(path: str, revision: str | None, download_dir: str | None) -> str:
    """Digest of a model's files; of a model whose files are not on this machine, its name."""
    folder = Path(path)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        try:
            config = try_to_load_from_cache(path, "config.json", download_dir, revision)
        except ValueError:  # no name of the hub
            config = None
        if not isinstance(config, str):
            return path
        folder = Path(config).parent
    return digest_of_files(folder)


def digest_of_files(folder: Path) -> str:
    """Return the digest of a model's folder: what configures the weights, and name, header and samples of each file of
    weights. Two sets of weights share it if they differ only between samples, as in single rows of a tensor."""
    weights = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".pt", ".pth"))
    configs = sorted([*folder.glob("config.json"), *folder.glob("hf_quant_config.json"), *folder.glob("*.index.json")])
    digest = hashlib.blake2b(digest_size=16)
    for path in configs:
        digest.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
    with ThreadPoolExecutor(KERNELS) as pool:
        for path, sampled in zip(weights, pool.map(_digest_of_file, weights)):
            digest.update(path.name.encode() + sampled)
    return digest.hexdigest()


def _digest_of_file(path: Path) -> bytes:
    """Of its size, what it says of its tensors, and samples of each."""
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    header, spans = _tensors_of(path, size)
    digest.update(header)
    file = os.open(path, os.O_RDONLY)
    try:
        for begin, end in spans:
            for at in _samples(begin, end):
                digest.update(os.pread(file, min(SAMPLE_BYTES, end - at), at))
    finally:
        os.close(file)
    return digest.digest()


def _tensors_of(path: Path, size: int) -> tuple[bytes, list[tuple[int, int]]]:
    """What a file says of its tensors, and where each begins and ends; of a file that says nothing, where it does."""
    if path.suffix == ".safetensors":
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = file.read(length) if length < size else b""
        try:
            tensors = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
            return header, sorted((8 + length + at, 8 + length + to) for at, to in (t["data_offsets"] for t in tensors))
        except (ValueError, KeyError):  # it is no such file, as one that is still a pointer to it
            return b"", [(0, size)]
    try:  # torch.save writes an archive with a checksum of each tensor
        with ZipFile(path) as archive:
            entries = [(entry.filename, entry.file_size, entry.CRC) for entry in archive.infolist()]
        return json.dumps(entries).encode(), [(0, size)]
    except BadZipFile:
        return b"", [(0, size)]


def _samples(begin: int, end: int) -> Iterator[int]:
    yield from range(begin, end, SAMPLE_STEP)
    if (last := end - SAMPLE_BYTES) > begin:
        yield last
