"""A storage behind the host: what its pages are called, and SGLang's files with a checksum."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import HiCacheFile
from torch import Tensor

from dsv4_sglang.cache.layout import CacheLayout
from dsv4_sglang.ops.trust import refuse_writable_by_all, require_own
from dsv4_sglang.srt import compat

log = logging.getLogger(__name__)

PAGE_VERSION = 2
"""Of what a page holds, beyond what `page_name` hashes."""
CHECKSUM_BYTES = 16
SAMPLE_BYTES = 1 << 16
DEFAULT_FOLDER = "/tmp/hicache"
OTHER_FOLDER = "Or set SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR to a folder that is yours alone"


def page_name(
    model_name: str | None, model_path: str, layout: CacheLayout, row_bytes: Sequence[int], **facts: Any
) -> str:
    """The name of a model in a storage, of which SGLang makes the names of its pages: its keys are hashes of tokens
    only, so that everything else that a page depends on stands here.

    `row_bytes`: of a block and of a checkpoint; `facts`: whatever else changes the bytes. Hashed as well are the
    version of this package, the layers of `layout` with their formats, and of a model in a folder its config and
    samples of its weights.
    """
    layers = [repr(schema) for schema in layout.schemas]
    described = json.dumps([version("dsv4_sglang"), layers, list(row_bytes), facts], default=str, sort_keys=True)
    digest = hashlib.blake2b(described.encode(), digest_size=8)
    digest.update(_weights(Path(model_path)))
    first = layout.schemas[0]
    formats = f"{first.row_format.value}-{first.key_format.value}"
    return f"{model_name or 'model'}-dsv4v{PAGE_VERSION}-{formats}-{digest.hexdigest()}"


def _weights(folder: Path) -> bytes:
    """Digest of a checkpoint folder: its config, and size, head and tail of each file of weights. Of a model that is
    no folder the name says which it is."""
    digest = hashlib.blake2b(digest_size=8)
    config = folder / "config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(SAMPLE_BYTES))
            file.seek(max(0, size - SAMPLE_BYTES))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()


def _own_folder(default: str) -> int:
    """Make the folder of the files for this user alone, if it is not there; the mode of files in it, which those may
    read who may read the folder.

    RuntimeError if others can put files there, which this server would read: where nobody names a folder, a link or one
    that others own as well, since its name in /tmp is known to all.
    """
    named = envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.get()
    folder = Path(named or default)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if named:
        refuse_writable_by_all(folder)
    elif folder.is_symlink():
        raise RuntimeError(f"{folder} is a link; expected a folder. {OTHER_FOLDER}")
    else:
        require_own(folder, OTHER_FOLDER)
    return folder.stat().st_mode & 0o666


class FileStorage(HiCacheFile):
    """SGLang's files, each with a checksum at its end. A file that is torn or was changed is a miss and a warning, and
    goes, so that it is written anew."""

    def __init__(self, storage_config: Any, file_path: str = DEFAULT_FOLDER) -> None:
        self._mode = _own_folder(file_path)
        super().__init__(storage_config, file_path)
        self._first_suffix: str = self.config_suffix

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a page; False without room. numpy does not say when the last bytes of a file could not be written."""
        page = torch.cat([value, _checksum(value)])
        if not super().set(key, page, target_location, target_sizes):
            return False
        with suppress(FileNotFoundError):  # removed meanwhile, to make room
            if (size := self._path(key).stat().st_size) != page.numel():
                self._remove(key, f"it has {size} bytes of {page.numel()}; is the file system full?")
                return False
            self._path(key).chmod(self._mode)
        return True

    def get(self, key: str, target_location: Tensor, target_sizes: Any = None) -> Tensor | None:
        size = target_location.numel()
        page = torch.empty(size + CHECKSUM_BYTES, dtype=torch.uint8)
        try:
            found = super().get(key, page, target_sizes)
        except OSError as error:
            self._remove(key, str(error))
            return None
        if found is None:
            return None
        if not torch.equal(found[size:], _checksum(found[:size])):
            self._remove(key, "its checksum is another")
            return None
        return target_location.copy_(found[:size])

    def _remove(self, key: str, why: str) -> None:
        path = self._path(key)
        log.warning("host tier: the stored page %s cannot be used and is removed: %s", path, why)
        with suppress(OSError):
            path.unlink()
        if self.metadata_cache is not None:
            self.metadata_cache.remove(path.stem)

    def _path(self, key: str) -> Path:
        return Path(self.file_path) / f"{key}{self.config_suffix}.bin"

    def use_name(self, name: str) -> None:
        """Pages from now on are those of the model under another name."""
        self.config_suffix: str = f"{self._first_suffix}-{name}"
        compat.rename_files(self, self.config_suffix)

    def clear(self) -> bool:
        """Remove the pages of this model; those of others in the same folder stay."""
        for path in Path(self.file_path).glob("*.bin"):
            if path.stem.endswith(self.config_suffix):
                with suppress(OSError):
                    path.unlink()
        if self.metadata_cache is not None:
            self.metadata_cache.clear()
        compat.forget_files(self)
        return True


def register_file_storage() -> None:
    """`--hicache-storage-backend file` is `FileStorage`, about which SGLang logs a warning."""
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    StorageBackendFactory.register_backend("file", __name__, FileStorage.__name__)


def _checksum(page: Tensor) -> Tensor:
    """[16] uint8."""
    digest = hashlib.blake2b(page.contiguous().numpy().data, digest_size=CHECKSUM_BYTES).digest()
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)
