"""The extension compiles for every architecture that is promised, is cached, and says what is missing."""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from dsv4_sglang.ops import extension


@pytest.fixture(scope="module")
def nvcc() -> Path:
    try:
        return extension.find_nvcc()
    except RuntimeError:
        pytest.skip("needs nvcc")


@pytest.fixture(scope="module")
def library(nvcc, tmp_path_factory) -> Path:
    return extension.build(extension.RELEASE_ARCHS, tmp_path_factory.mktemp("build"))


@pytest.mark.slow
def test_compiles_for_all_architectures(library):
    assert library.name.endswith("-sm80_sm89_sm90a_sm100a.so")
    assert [p.name for p in library.parent.iterdir() if p.suffix != ".lock"] == [library.name]


@pytest.mark.slow
def test_is_compiled_once(library, monkeypatch):
    monkeypatch.setattr(extension, "_compile", lambda *args: pytest.fail("compiled again"))
    assert extension.build(extension.RELEASE_ARCHS, library.parent) == library


@pytest.mark.slow
def test_takes_only_the_stable_abi_from_torch(library):
    """All that it wants of torch is C functions of the stable ABI, and this torch has all but the CUDA stream."""
    listing = subprocess.run(
        ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
    ).stdout
    symbols = [line.split()[-1] for line in listing.splitlines()]
    wanted = {s for s in symbols if "torch" in s or "c10" in s}
    assert wanted and all(s.startswith(("aoti_torch_", "torch_")) for s in wanted), wanted
    torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    missing = {s for s in wanted if not hasattr(torch_cpu, s)}
    assert missing == {"aoti_torch_get_current_cuda_stream"}


def test_prebuilt_library_is_found_by_architecture_and_sources(tmp_path, monkeypatch):
    sources = extension.source_hash()
    for name in (f"dsv4_sglang-{sources}-0-sm80_sm90a.so", "dsv4_sglang-0000-0-sm89.so"):
        (tmp_path / name).touch()
    assert extension.find_prebuilt("90a", tmp_path).name == f"dsv4_sglang-{sources}-0-sm80_sm90a.so"
    assert extension.find_prebuilt("90", tmp_path) is None
    assert extension.find_prebuilt("89", tmp_path) is None, "made from other sources"
    assert extension.find_prebuilt("80", tmp_path / "nowhere") is None


def test_source_hash_follows_the_sources(tmp_path, monkeypatch):
    (tmp_path / "csrc").mkdir()
    source = tmp_path / "csrc" / "register.cpp"
    source.write_text("int x;")
    monkeypatch.setattr(extension, "PACKAGE", tmp_path)
    before = extension.source_hash()
    assert extension.source_hash() == before
    source.write_text("int y;")
    assert extension.source_hash() != before


def test_missing_compiler_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(extension, "DEFAULT_CUDA_HOME", tmp_path)
    with pytest.raises(RuntimeError, match=r"needs nvcc.*Install the CUDA toolkit"):
        extension.find_nvcc()


def test_missing_library_is_named(monkeypatch):
    monkeypatch.setenv("DSV4_SGLANG_EXTENSION", "/nowhere/x.so")
    with pytest.raises(RuntimeError, match=r"DSV4_SGLANG_EXTENSION is /nowhere/x\.so"):
        extension.load.__wrapped__()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_no_gpu_is_an_error_of_its_own(monkeypatch):
    monkeypatch.delenv("DSV4_SGLANG_EXTENSION", raising=False)
    with pytest.raises(RuntimeError, match="needs an NVIDIA GPU"):
        extension.load.__wrapped__()
