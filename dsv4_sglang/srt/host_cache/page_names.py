"""Names of a model's pages in a storage. A name depends on everything that decides the bytes of a page."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dsv4_sglang.cache.layout import CacheLayout
from dsv4_sglang.srt.host_cache.folder import PAGE_VERSION

log = logging.getLogger(__name__)

# Load format of random weights.
DUMMY = "dummy"
# Fields of SGLang's ServerArgs that decide the weights or the arithmetic of the model.
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
# Readable characters of a name.
LABEL_CHARACTERS = 24
# A digest reads the first and last SAMPLE_BYTES of each tensor, and SAMPLE_BYTES at each SAMPLE_STEP between.
SAMPLE_BYTES, SAMPLE_STEP = 4096, 1 << 20
KERNELS = 16


def page_name(model_name: str | None, layout: CacheLayout, row_bytes: Sequence[int], **facts: Any) -> str:
    """Return the name of a model's pages, of at most 99 characters.

    SGLang's page keys are hashes of tokens only. The name is appended to the key.

    Args:
        model_name: name under which the server serves the model.
        layout: layout of the cache, with its formats.
        row_bytes: bytes of a block and of a snapshot.
        facts: everything else that changes the bytes, such as `weight_facts`.
    """
    layers = [repr(schema) for schema in layout.schemas]
    described = [version("dsv4_sglang"), model_name, layers, list(row_bytes), facts]
    digest = hashlib.blake2b(json.dumps(described, default=str, sort_keys=True).encode(), digest_size=16)
    label = re.sub(r"[^A-Za-z0-9.-]", "-", Path(model_name or "model").name)[:LABEL_CHARACTERS]
    first = layout.schemas[0]
    entries = [first.ring_format, *([first.entry_format] if first.entry_format is not first.ring_format else [])]
    formats = "-".join(stored.value for stored in (*entries, first.key_format))
    return f"{label}-dsv4v{PAGE_VERSION}-{formats}-{digest.hexdigest()}"


def weight_facts(server_args: Any) -> dict[str, Any]:
    """Return what decides the weights of a server: flags, and a digest of the files of the model and draft model."""
    facts = {field: getattr(server_args, field) for field in WEIGHT_FLAGS}
    if draws_weights(server_args):
        facts["random_seed"] = server_args.random_seed
    models = [(server_args.model_path, server_args.revision)]
    draft = server_args.speculative_draft_model_path
    if draft is not None and draft != server_args.model_path:
        models.append((draft, server_args.speculative_draft_model_revision))
    begin = time.monotonic()
    facts["files"] = [_digest_of_model(path, revision, server_args.download_dir) for path, revision in models]
    log.info("host cache: hashed samples of the weights for the page names in %.1f s", time.monotonic() - begin)
    return facts


def draws_weights(server_args: Any) -> bool:
    """Return True if the weights of the model or its draft model are random."""
    return DUMMY in (server_args.load_format, server_args.speculative_draft_load_format)


def _digest_of_model(path: str, revision: str | None, download_dir: str | None) -> str:
    """Return the digest of a model's files, or its name if its files are not on this machine."""
    folder = Path(path)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        try:
            config = try_to_load_from_cache(path, "config.json", download_dir, revision)
        except ValueError:  # not a name on the Hugging Face hub
            config = None
        if not isinstance(config, str):
            return path
        folder = Path(config).parent
    return digest_of_files(folder)


def digest_of_files(folder: Path) -> str:
    """Return the digest of a model's folder: configuration, and name, header and samples of each weight file.

    Two sets of weights have the same digest if they differ only between samples, as in single rows of a tensor.
    """
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
    """Return the digest of a weight file's size, its header and samples of each tensor.

    A file without a header of safetensors, for example a Git LFS pointer, counts as one tensor.
    """
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with path.open("rb", buffering=0) as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length < size else b""
        try:
            offsets = [entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"]
            spans = sorted((8 + length + at, 8 + length + to) for at, to in offsets)
        except (ValueError, KeyError):
            header, spans = b"", [(0, size)]
        digest.update(header)
        for begin, end in spans:
            for at in _samples(begin, end):
                file.seek(at)
                digest.update(file.read(min(SAMPLE_BYTES, end - at)))
    return digest.digest()


def _samples(begin: int, end: int) -> Iterator[int]:
    yield from range(begin, end, SAMPLE_STEP)
    if (last := end - SAMPLE_BYTES) > begin:
        yield last
