"""Build and load the CUDA extension, `csrc/`.

`load()` registers the CUDA implementations of the ops. It uses the first of these libraries:

1. the file that `DSV4_SGLANG_EXTENSION` names;
2. a library in `PREBUILT` that was built from the current sources and contains the device's architecture;
3. such a library in the cache, from an earlier first use;
4. a new one for the current GPU, built with nvcc (which nothing else needs).

To build ahead of time, on any machine:

    python -m dsv4_sglang.ops.extension --arch 80,89,90a,100a [--out DIR]

The extension uses LibTorch's stable ABI only, so one file works with torch 2.11 and later, with any CUDA version. The
cache is `DSV4_SGLANG_CACHE`, by default `~/.cache/dsv4_sglang`. It must belong to this user: a folder or library there
that others own or can write is rejected (`dsv4_sglang.ops.trust`). A file's name contains a hash of sources and flags,
and the architectures.
"""

import argparse
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dsv4_sglang.ops.trust import reject_writable_by_all, require_own

logger = logging.getLogger(__name__)

PACKAGE = Path(__file__).resolve().parent.parent
PREBUILT = PACKAGE / "prebuilt"
DEFAULT_CUDA_HOME = Path("/usr/local/cuda")
RELEASE_ARCHS = ("80", "89", "90a", "100a", "120a")
COMPILED = (".cu", ".cpp")
OTHER_CACHE = "Or set DSV4_SGLANG_CACHE to a folder that is yours alone"
FLAGS = (
    "-O3",
    "-std=c++17",
    "-shared",
    "-Xcompiler",
    "-fPIC,-fvisibility=hidden",
    "-DUSE_CUDA",
    "-DTORCH_TARGET_VERSION=0x020b000000000000",  # stable ABI of torch 2.11
)


def source_dir() -> Path:
    """Return `csrc/`: inside an installed package, beside it in a checkout."""
    for candidate in (PACKAGE / "csrc", PACKAGE.parent / "csrc"):
        if (candidate / "register.cpp").is_file():
            return candidate
    raise RuntimeError(
        f"the CUDA sources are neither in {PACKAGE / 'csrc'} nor in {PACKAGE.parent / 'csrc'}; reinstall the package"
    )


def files() -> list[Path]:
    """Return all sources and headers."""
    return sorted(path for path in source_dir().rglob("*") if path.suffix in (*COMPILED, ".h", ".cuh"))


def source_hash() -> str:
    """Return a hash of all sources, headers and flags, 16 hex digits."""
    digest = hashlib.sha256("\0".join(FLAGS).encode())
    for path in files():
        digest.update(f"\0{path.relative_to(source_dir())}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def find_nvcc() -> Path:
    """Return the CUDA compiler of CUDA_HOME, of PATH, or of DEFAULT_CUDA_HOME. Raise RuntimeError if none has one."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    folders = [Path(home) / "bin"] if home else []
    folders += [*map(Path, os.get_exec_path()), DEFAULT_CUDA_HOME / "bin"]
    nvcc = shutil.which("nvcc", path=os.pathsep.join(map(str, folders)))
    if nvcc is None:
        raise RuntimeError(
            f"building the CUDA extension needs nvcc, which is neither in CUDA_HOME, PATH nor {DEFAULT_CUDA_HOME}. "
            "Install the CUDA toolkit 12.8 or later (https://developer.nvidia.com/cuda-downloads, or "
            "the conda package cuda-nvcc), or build elsewhere with `python -m dsv4_sglang.ops.extension --arch ... "
            "--out DIR` and set DSV4_SGLANG_EXTENSION to the file"
        )
    return Path(nvcc)


def cache_dir() -> Path:
    configured = os.environ.get("DSV4_SGLANG_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "dsv4_sglang"


def find_cached(arch: str) -> Path | None:
    """Return a library of the cache as `find_library` does. Nothing is written.

    Raises:
        RuntimeError: others own the cache or the library, or can write it.
    """
    folder = cache_dir()
    if not folder.is_dir():
        return None
    require_own(folder, OTHER_CACHE)
    library = find_library(arch, folder)
    if library is not None:
        require_own(library, OTHER_CACHE)
    return library


def _make_cache() -> Path:
    """Return the cache folder. Create it if necessary, accessible to this user only."""
    folder = cache_dir()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise RuntimeError(f"cannot create the cache of the CUDA extension: {error}. {OTHER_CACHE}") from error
    require_own(folder, OTHER_CACHE)
    return folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Context manager: only one process builds into `folder` at a time. The lock is released when the process ends."""
    try:
        # Read access to the folder is enough to wait. A symbolic link is not followed, because another user may have
        # put it there.
        lock = os.open(folder / "build.lock", os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise RuntimeError(
            f"the CUDA extension is not in {folder} and cannot be built there: {error}. Build it ahead of time with "
            "`python -m dsv4_sglang.ops.extension --arch ... --out DIR` and set DSV4_SGLANG_EXTENSION to the file, or "
            "set DSV4_SGLANG_CACHE to a folder that you can write"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _compile(archs: Sequence[str], output: Path) -> None:
    import torch

    nvcc = find_nvcc()
    if shutil.which("g++") is None:
        raise RuntimeError(
            "building the CUDA extension needs g++ with C++17; install it (Debian, Ubuntu: apt install g++)"
        )
    root = Path(torch.__file__).parent
    # The loader finds the stable ABI's functions only in libraries that ours depends on, directly or indirectly. In
    # CUDA builds of torch, libtorch depends on libtorch_cuda; the torch used here need not be a CUDA build.
    libraries = [f"-L{root / 'lib'}", "-Xlinker", "--no-as-needed", "-ltorch", "-ltorch_cpu"]
    codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    threads = str(min(len(archs), os.cpu_count() or 1))
    inputs = [f"-I{root / 'include'}", *(str(path) for path in files() if path.suffix in COMPILED), *libraries]
    command = [str(nvcc), *FLAGS, "-t", threads, *codes, *inputs, "-o", str(output)]
    # nvcc's temporary files go to the folder of the output, which only this user can write.
    environment = {**os.environ, "TMPDIR": str(output.parent)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode:
        message = (result.stderr or result.stdout).strip()
        raise RuntimeError(f"nvcc failed with exit status {result.returncode}\n{' '.join(command)}\n{message}")


def build(archs: Sequence[str], out: Path) -> Path:
    """Return the library for `archs` ("90a", ...) in folder `out`. Compile it if it does not exist."""
    target = out / f"dsv4_sglang-{source_hash()}-{'_'.join('sm' + arch for arch in archs)}.so"
    out.mkdir(parents=True, exist_ok=True)
    reject_writable_by_all(out)
    if not target.exists():
        with _locked(out):
            if not target.exists():
                _build(archs, target)
    require_own(target, "Remove it, or name another folder")
    return target


def _build(archs: Sequence[str], target: Path) -> None:
    logger.warning("building the CUDA extension for %s (about half a minute, once)", ", ".join(archs))
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        unfinished = Path(scratch) / target.name
        _compile(archs, unfinished)
        # Independent of the umask, only the owner may write a file that others load.
        unfinished.chmod(unfinished.stat().st_mode & 0o755)
        os.replace(unfinished, target)


def device_arch() -> str:
    """Return the architecture of the current GPU as nvcc names it, with "a" if it has architecture-specific code.

    Raises:
        RuntimeError: there is no GPU, or it is older than sm_80.
    """
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError(
            "the CUDA extension needs an NVIDIA GPU and a CUDA build of torch; torch.cuda.is_available() is False"
        )
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        raise RuntimeError(f"the GPU is sm_{major}{minor}; the CUDA extension needs sm_80 or later")
    return f"{major}{minor}" + ("a" if major >= 9 else "")


def find_library(arch: str, folder: Path) -> Path | None:
    """Return a library in `folder` that was built from the current sources and contains `arch`."""
    found = sorted(folder.glob(f"dsv4_sglang-{source_hash()}-*.so"))
    return next((p for p in found if f"sm{arch}" in p.stem.rsplit("-", 1)[1].split("_")), None)


@functools.cache
def load() -> Path:
    """Register the CUDA ops, building them first if necessary. Return the library's path. Later calls only return it.

    Raises:
        RuntimeError: there is no supported GPU, the library or its folder is not trusted, or the build fails.
    """
    import torch

    from dsv4_sglang.ops import schemas  # noqa: F401  (the schemas that the library implements)

    configured = os.environ.get("DSV4_SGLANG_EXTENSION")
    if configured:
        path = Path(configured)
        if not path.is_file():
            raise RuntimeError(f"DSV4_SGLANG_EXTENSION is {configured}, which is not a file")
        reject_writable_by_all(path)
    else:
        arch = device_arch()
        path = find_library(arch, PREBUILT) or find_cached(arch) or build([arch], _make_cache())
    torch.ops.load_library(str(path))
    return path


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dsv4_sglang.ops.extension", description="Build the CUDA extension ahead of time."
    )
    parser.add_argument("--arch", help=f"comma-separated, e.g. {','.join(RELEASE_ARCHS)}; default: the present GPU's")
    parser.add_argument(
        "--out", type=Path, default=PREBUILT, help="folder; default: inside the package, where load() looks first"
    )
    options = parser.parse_args(argv)
    archs = options.arch.split(",") if options.arch else [device_arch()]
    print(build(archs, options.out))


if __name__ == "__main__":
    main()
