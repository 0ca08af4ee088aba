"""The extension compiles for each kind of architecture, is cached, and reports missing tools."""

import contextlib
import ctypes
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dsv4_sglang.ops import extension

# Each condition of the sources holds for one of these and does not hold for another. tools/wheels.sh compiles
# RELEASE_ARCHS for a release.
ARCHS = ("80", "90a", "120a")
CONDITIONS = {"__CUDA_ARCH__", "__CUDA_ARCH__ >= 890", "__CUDA_ARCH__ >= 900", "__CUDA_ARCH_FEAT_SM90_ALL"}


@pytest.fixture(scope="module")
def nvcc() -> Path:
    try:
        return extension.find_nvcc()
    except RuntimeError:
        pytest.skip("needs nvcc")


@pytest.fixture(scope="module")
def library(nvcc, tmp_path_factory) -> Iterator[Path]:
    """Library for ARCHS, with little optimisation of device code if nvcc has an option for it, and none of host code.

    It compiles in half the time. No test runs its kernels.
    """
    options = subprocess.run([nvcc, "--help"], capture_output=True, text=True, check=True).stdout
    quick = ("-Xcompiler", "-O0", *(("--Ofast-compile", "max") if "--Ofast-compile" in options else ()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extension, "FLAGS", (*extension.FLAGS, *quick))
        yield extension.build(ARCHS, tmp_path_factory.mktemp("build"))


@pytest.mark.full
@pytest.mark.slow
def test_is_compiled_once_for_several_architectures(library, monkeypatch):
    assert library.name.endswith("-sm80_sm90a_sm120a.so")
    assert [p.name for p in library.parent.iterdir() if p.suffix != ".lock"] == [library.name]
    monkeypatch.setattr(extension, "_compile", lambda *args: pytest.fail("compiled again"))
    assert extension.build(ARCHS, library.parent) == library


def test_compiled_architectures_have_all_code():
    sources = "".join(path.read_text() for path in extension.files())
    assert {*re.findall(r"__CUDA_ARCH\w*(?: [<>=]+ \d+)?", sources)} == CONDITIONS
    assert {*ARCHS} <= {*extension.RELEASE_ARCHS}


@pytest.mark.full
@pytest.mark.slow
def test_takes_only_the_stable_abi_from_torch(library):
    """All torch symbols of the library are C functions of the stable ABI.

    This torch has all of them except the CUDA stream.
    """
    listing = subprocess.run(
        ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
    ).stdout
    symbols = [line.split()[-1] for line in listing.splitlines()]
    wanted = {s for s in symbols if "torch" in s or "c10" in s}
    assert wanted and all(s.startswith(("aoti_torch_", "torch_")) for s in wanted), wanted
    torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    missing = {s for s in wanted if not hasattr(torch_cpu, s)}
    assert missing == {"aoti_torch_get_current_cuda_stream"}


def test_a_library_is_found_by_architecture_and_sources(tmp_path, monkeypatch):
    (tmp_path / "csrc").mkdir()
    source = tmp_path / "csrc" / "register.cpp"
    source.write_text("int x;")
    monkeypatch.setattr(extension, "PACKAGE", tmp_path)
    library = tmp_path / f"dsv4_sglang-{extension.source_hash()}-sm80_sm90a.so"
    library.touch()
    assert extension.find_library("90a", tmp_path) == library
    assert extension.find_library("90", tmp_path) is None
    assert extension.find_library("90a", tmp_path / "nowhere") is None
    source.write_text("int y;")
    assert extension.find_library("90a", tmp_path) is None, "made from other sources"


def test_missing_compiler_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(extension, "DEFAULT_CUDA_HOME", tmp_path)
    with pytest.raises(RuntimeError, match=r"needs nvcc.*Install the CUDA toolkit"):
        extension.find_nvcc()


# Ownership and permissions of loaded files


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder with a library for the present sources, on a machine without a compiler."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    (folder / f"dsv4_sglang-{extension.source_hash()}-sm90a.so").touch(mode=0o644)
    monkeypatch.delenv("DSV4_SGLANG_EXTENSION", raising=False)
    monkeypatch.setenv("DSV4_SGLANG_CACHE", str(folder))
    monkeypatch.setattr(extension, "PREBUILT", tmp_path / "nowhere")
    monkeypatch.setattr(extension, "device_arch", lambda: "90a")
    monkeypatch.setattr(extension, "find_nvcc", lambda: pytest.fail("nvcc was looked for"))
    monkeypatch.setattr(extension, "_locked", lambda folder: pytest.fail("the cache was locked"))
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    return folder


def library_of(cache: Path) -> Path:
    return next(cache.glob("*.so"))


def give_to_another(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `path` belong to another user: with chown as root, otherwise by patching os.geteuid."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        me = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: me + 1)


def test_cached_library_loads_without_nvcc(cache: Path) -> None:
    cache.chmod(0o500)
    assert extension.load.__wrapped__() == library_of(cache)


@pytest.mark.parametrize("part", ["folder", "library"])
def test_library_writable_by_others_is_rejected(cache: Path, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rejected = cache if part == "folder" else library_of(cache)
    mode = rejected.stat().st_mode & 0o777
    for open_mode in (0o775, 0o757):
        rejected.chmod(open_mode)
        said = rf"{re.escape(str(rejected))} has mode 0{open_mode:o}: users other than .*chmod go-w"
        with pytest.raises(RuntimeError, match=said):
            extension.load.__wrapped__()
    rejected.chmod(mode)
    give_to_another(rejected, monkeypatch)
    with pytest.raises(RuntimeError, match=r"belongs to user \d+; expected user .* DSV4_SGLANG_CACHE"):
        extension.load.__wrapped__()


def test_named_library_must_exist_and_be_protected(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_SGLANG_EXTENSION", "/nowhere/x.so")
    with pytest.raises(RuntimeError, match=r"DSV4_SGLANG_EXTENSION is /nowhere/x\.so"):
        extension.load.__wrapped__()
    named = library_of(cache)
    monkeypatch.setenv("DSV4_SGLANG_EXTENSION", str(named))
    named.chmod(0o775)
    assert extension.load.__wrapped__() == named, "owner and group are the user's choice"
    named.chmod(0o757)
    with pytest.raises(RuntimeError, match=r"has mode 0757: every user can write it"):
        extension.load.__wrapped__()
    named.chmod(0o644)
    cache.chmod(0o777)
    with pytest.raises(RuntimeError, match=r"has mode 0777: every user can write it"):
        extension.load.__wrapped__()
    cache.chmod(0o1777)
    assert extension.load.__wrapped__() == named, "as in /tmp, where no user can replace a different user's file"


@pytest.fixture
def quick_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the compiler by a function that writes an empty library with write permission for all users."""

    def compile_(archs: object, output: Path) -> None:
        assert output.parent.stat().st_mode & 0o077 == 0, "others can put files beside an unfinished library"
        output.touch()
        output.chmod(0o777)

    monkeypatch.setattr(extension, "_compile", compile_)


def test_first_use_creates_a_private_cache(cache: Path, quick_build: None, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = cache.parent / "another"
    monkeypatch.setenv("DSV4_SGLANG_CACHE", str(mine))
    monkeypatch.setattr(extension, "_locked", lambda folder: contextlib.nullcontext())
    library = extension.load.__wrapped__()
    assert library.parent == mine
    assert (mine.stat().st_mode & 0o777, library.stat().st_mode & 0o777) == (0o700, 0o755)


def test_build_ignores_files_of_others(quick_build: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(RuntimeError, match="every user can write it"):
        extension.build(["90a"], tmp_path)
    tmp_path.chmod(0o1777)
    (tmp_path / "theirs").touch()
    (tmp_path / "build.lock").symlink_to(tmp_path / "theirs")
    with pytest.raises(RuntimeError, match=r"cannot be built there.*build\.lock"):
        extension.build(["90a"], tmp_path)
    (tmp_path / "build.lock").unlink()
    library = extension.build(["90a"], tmp_path)
    give_to_another(library, monkeypatch)
    with pytest.raises(RuntimeError, match=r"belongs to user"):
        extension.build(["90a"], tmp_path)


def test_cache_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DSV4_SGLANG_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(RuntimeError, match=r"cannot create the cache .*: .*file/cache.* set DSV4_SGLANG_CACHE"):
        extension._make_cache()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_no_gpu_is_an_error_of_its_own(monkeypatch):
    monkeypatch.delenv("DSV4_SGLANG_EXTENSION", raising=False)
    with pytest.raises(RuntimeError, match="needs an NVIDIA GPU"):
        extension.load.__wrapped__()
