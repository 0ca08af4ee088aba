"""Storages behind the host: what pages are called there, and SGLang's files with a checksum."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolTransferResult
from torch import Tensor

from dsv4_sglang.cache.layout import CacheLayout
from dsv4_sglang.ops.trust import refuse_writable_by_all, require_own
from dsv4_sglang.srt import compat
from dsv4_sglang.srt.host.pools import intact, seal
from dsv4_sglang.srt.host.sealed import or_miss

log = logging.getLogger(__name__)

PAGE_VERSION = 3
"""Of what a page holds, beyond what `page_name` hashes."""
SAMPLE_BYTES = 1 << 16
DEFAULT_FOLDER = "/tmp/hicache"
WRONG_CHECKSUM = "its checksum is another"
"""Of a page that was changed, or is another's under this name."""


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
    no folder here: what it is called."""
    digest = hashlib.blake2b(digest_size=8)
    if not folder.is_dir():
        digest.update(str(folder).encode())
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


def own_folder(named: str | None, default: str, variable: str) -> int:
    """Make the folder of the files for this user alone, if it is not there; the mode of files in it, which those may
    read who may read the folder. `named`: as `variable` of the environment says.

    RuntimeError if others can put files there, which this server would read: where nobody names a folder, a link or one
    that others own as well, since its name in /tmp is known to all.
    """
    folder, other = Path(named or default), f"Or set {variable} to a folder that is yours alone"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if named:
        refuse_writable_by_all(folder)
    elif folder.is_symlink():
        raise RuntimeError(f"{folder} is a link; expected a folder. {other}")
    else:
        require_own(folder, other)
    return folder.stat().st_mode & 0o666


class FileStorage(HiCacheFile):
    """SGLang's files, each a row with its checksum. A file that is torn or was changed is a miss and a warning, and
    goes, so that it is written anew."""

    def __init__(self, storage_config: Any, file_path: str = DEFAULT_FOLDER) -> None:
        variable = envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR
        self._mode = own_folder(variable.get(), file_path, variable.name)
        super().__init__(storage_config, file_path)
        self._first_suffix: str = self.config_suffix

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a page; False without room. numpy does not say when the last bytes of a file could not be written."""
        seal(value, self._path(key).stem)
        if not super().set(key, value, target_location, target_sizes):
            return False
        with suppress(OSError):  # removed meanwhile, to make room; or another user's, who had stored it before
            if (size := self._path(key).stat().st_size) != value.numel():
                self._remove(key, f"it has {size} bytes of {value.numel()}; is the file system full?")
                return False
            self._path(key).chmod(self._mode)
        return True

    def get(self, key: str, target_location: Tensor, target_sizes: Any = None) -> Tensor | None:
        try:
            found = super().get(key, target_location, target_sizes)
        except OSError as error:
            self._remove(key, str(error))
            return None
        if found is not None and not intact(found, self._path(key).stem):
            self._remove(key, WRONG_CHECKSUM)
            return None
        return found

    def batch_exists_v2(self, *arguments: Any, **named: Any) -> PoolTransferResult:
        return or_miss(PoolTransferResult(0, {}), super().batch_exists_v2, *arguments, **named)

    def _remove(self, key: str, why: str) -> None:
        path = self._path(key)
        remove_page(path, why)
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


def remove_page(path: Path, why: str) -> None:
    """Remove the file of a page that cannot be used, with a warning."""
    log.warning("host tier: the stored page %s cannot be used and is removed: %s", path, why)
    with suppress(OSError):
        path.unlink()


def register_storages() -> None:
    """`--hicache-storage-backend` means ours; SGLang logs a warning about each."""
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    StorageBackendFactory.register_backend("file", __name__, FileStorage.__name__)
    # By name: only who asks for one of them needs its package.
    StorageBackendFactory.register_backend("nixl", "dsv4_sglang.srt.host.nixl", "NixlStorage")
    StorageBackendFactory.register_backend("mooncake", "dsv4_sglang.srt.host.mooncake", "MooncakeStorage")
