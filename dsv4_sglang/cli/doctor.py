"""`dsv4-sglang doctor`: check the requirements of a server with this cache, and the correctness of the ops."""

from __future__ import annotations

import importlib
import pkgutil
import platform
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

import typer

from dsv4_sglang.requirements import MODULES, MODULES_OF_SGLANG, PLUGIN, PLUGIN_GROUP, advice, missing, plugin_fault
from dsv4_sglang.srt.launch.command import has_gpu, prepare_this_process

State = Literal["ok", "note", "fail"]
COLOURS: dict[State, str] = {"ok": "green", "note": "yellow", "fail": "bold red"}

PYTHONS = ((3, 10), (3, 13))
LEAST_CAPABILITY = (8, 0)
# Folder of each library's compiled kernels in SGLang's cache.
COMPILED_KERNELS = {
    "FlashInfer": ".cache/flashinfer",
    "DeepGEMM": "deep_gemm",
    "TileLang": "tilelang",
    "Triton": "triton",
    "SGLang": "jit",
}
# Relative error of the worst token of a layer. A GPU may multiply fp32 as tf32; FP8 entries differ by a rounding step.
EXACT_CPU, EXACT_GPU, SERVED = 1e-4, 1e-2, 5e-2


class Finding(NamedTuple):
    """One line of the report. "note" is informative, "fail" makes the exit code 1."""

    what: str
    found: str
    state: State = "ok"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def python_and_packages(gpu: bool) -> Iterator[Finding]:
    least, most = PYTHONS
    here = sys.version_info[:2]
    supported = least <= here <= most
    wanted = f"; needs {least[0]}.{least[1]} to {most[0]}.{most[1]}"
    yield Finding("python", platform.python_version() + ("" if supported else wanted), "ok" if supported else "fail")
    for distribution, module in {**MODULES, **MODULES_OF_SGLANG}.items():
        if find_spec(module) is None:
            yield Finding(distribution, "not installed", "fail")
        elif distribution != "sglang":  # `sglang_version` says more
            yield Finding(distribution, _version(distribution) or "unknown version")
    kernels = _version("sglang-kernel") or _version("sgl-kernel")
    flash_mla, flashinfer = _version("sgl-flash-mla"), _version("flashinfer-python")
    for name, found in (("sgl_kernel", kernels), ("flash_mla", flash_mla), ("flashinfer", flashinfer)):
        if gpu:
            yield Finding(name, found or "not installed", "ok" if found else "fail")
        else:
            yield Finding(name, "not used without a GPU")


def sglang_version(gpu: bool) -> Iterator[Finding]:
    from dsv4_sglang.srt.sglang import release

    found = release.sglang_version()
    if release.is_supported():
        yield Finding("sglang", f"{found}, the supported release")
    else:
        yield Finding("sglang", f"{found}, not tested; supported: {release.RELEASE}", "note")


def device(gpu: bool) -> Iterator[Finding]:
    import torch

    if not gpu:
        yield Finding("GPU", "none: the PyTorch ops run on the CPU, for trials and tests", "note")
        return
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    )
    yield Finding("driver", f"{driver.stdout.split()[0] if driver.stdout else 'unknown'}, CUDA {torch.version.cuda}")
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        capability = (properties.major, properties.minor)
        text = f"{properties.name}, sm_{capability[0]}{capability[1]}, {properties.total_memory / 2**30:.0f} GiB"
        if capability >= LEAST_CAPABILITY:
            yield Finding(f"GPU {i}", text)
        else:
            yield Finding(f"GPU {i}", f"{text}; the kernels need sm_80 or newer", "fail")


def compiler(gpu: bool) -> Iterator[Finding]:
    for name in ("nvcc", "c++"):
        path = shutil.which(name)
        if path is None:
            yield Finding(name, "not found; only needed to build the CUDA extension", "note")
            continue
        version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout.strip().splitlines()
        line = next((v for v in version if "release" in v), version[0] if version else "unknown version")
        yield Finding(name, f"{path}: {line.strip()}")


def compiled_kernels(gpu: bool) -> Iterator[Finding]:
    """Report the kernels that starts of servers have compiled on this machine (docs/guides/first_start.md)."""
    if not gpu:
        yield Finding("compiled kernels", "not used without a GPU")
        return
    from sglang.srt.environ import envs

    folder = Path(envs.SGLANG_CACHE_DIR.get()).expanduser()
    sizes = {
        name: sum(file.stat().st_size for file in (folder / part).rglob("*") if file.is_file())
        for name, part in COMPILED_KERNELS.items()
    }
    found = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in sizes.items() if size)
    if found:
        yield Finding("compiled kernels", f"{found} in {folder}")
    else:
        yield Finding("compiled kernels", f"none in {folder}; the first start compiles for minutes", "note")


def extension(gpu: bool) -> Iterator[Finding]:
    """Load the CUDA extension. The first call builds it, as the first start of a server would."""
    if not gpu:
        yield Finding("extension", "not used without a GPU")
        return
    from dsv4_sglang.ops.extension import load

    yield Finding("extension", str(load()))


def plugin(gpu: bool) -> Iterator[Finding]:
    if fault := plugin_fault():
        yield Finding("plugin", fault, "fail")
    else:
        target = metadata.entry_points(group=PLUGIN_GROUP)[PLUGIN].value
        pkgutil.resolve_name(target)
        yield Finding("plugin", target)


def sglang_contract(gpu: bool) -> Iterator[Finding]:
    """Check what this package uses of SGLang: the functions that it replaces with their parameters, the flags that it
    reads, its subclasses, and the private methods that they override."""
    from dsv4_sglang.srt.launch.options import Options
    from dsv4_sglang.srt.plugin import sglang_contract
    from dsv4_sglang.srt.plugin.hooks import hooks_of
    from dsv4_sglang.srt.plugin.overrides import OVERRIDES
    from dsv4_sglang.srt.plugin.server_context import ServerContext
    from dsv4_sglang.srt.sglang.flags import flag_defaults

    hooks, flags = hooks_of(ServerContext(Options()), on_cpu=not gpu), len(flag_defaults())
    for what, different, right in (
        (
            "hook",
            sglang_contract.hook_differences(hooks),
            f"all {len(hooks)} targets exist with the expected parameters",
        ),
        ("flag", sglang_contract.flag_differences(), f"all flags that are read exist, among {flags} of SGLang"),
        ("override", sglang_contract.override_differences(OVERRIDES), f"all {len(OVERRIDES)} methods are as expected"),
    ):
        yield from (Finding(what, line, "fail") for line in different)
        if not different:
            yield Finding(f"{what}s", right)
    for module in ("dsv4_sglang.srt.attention.backend", "dsv4_sglang.srt.models.deepseek_v4"):
        importlib.import_module(module)
        yield Finding("import", module)


def self_test(gpu: bool) -> Iterator[Finding]:
    import torch

    from dsv4_sglang.testing import selftest

    # The formulas run on the CPU with tensors so small that many threads mostly wait for each other.
    torch.set_num_threads(min(torch.get_num_threads(), 4))
    for formats, name, tolerance in (
        (selftest.EXACT, "fp32", EXACT_GPU if gpu else EXACT_CPU),
        (selftest.SERVED, "FP8", SERVED),
    ):
        for ratio, kind in ((0, "window"), (4, "CSA"), (128, "HCA")):
            error = selftest.layer_error(ratio, "cuda" if gpu else "cpu", formats)
            right = error < tolerance  # false for nan too
            text = f"error {error:.1e}" + ("" if right else f", more than {tolerance:.0e}")
            yield Finding(f"{kind} layer, {name} entries", text, "ok" if right else "fail")


Check = Callable[[bool], Iterator[Finding]]
CHECKS: tuple[Check, ...] = (
    python_and_packages,
    sglang_version,
    device,
    compiler,
    compiled_kernels,
    extension,
    plugin,
    sglang_contract,
    self_test,
)


def examine(gpu: bool, checks: Iterable[Check]) -> Iterator[Finding]:
    """Yield the findings of the checks. A check that raises is a finding too."""
    for check in checks:
        try:
            yield from check(gpu)
        except Exception as error:
            yield Finding(check.__name__.replace("_", " "), f"{type(error).__name__}: {error}", "fail")


def doctor() -> None:
    """Check versions, GPU, compiler, extension and hooks, and the ops on one layer of each kind.

    If a required package is missing, only the packages are checked: the other checks import them.
    """
    from rich.console import Console
    from rich.text import Text

    absent, checks = missing(), CHECKS
    if absent:
        gpu, checks = shutil.which("nvidia-smi") is not None, (python_and_packages,)
    else:
        gpu = has_gpu()
        prepare_this_process(cpu=not gpu)
    console, findings = Console(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang warns about missing hardware
        # Print line by line: on a GPU the first self test compiles kernels for a minute.
        for finding in examine(gpu, checks):
            findings.append(finding)
            state = Text(f"{finding.state:5}", COLOURS[finding.state])
            console.print(Text.assemble(state, f" {finding.what}: {finding.found}"), soft_wrap=True)
    failed = sum(finding.state == "fail" for finding in findings)
    typer.echo(f"{failed} of {len(findings)} checks failed" if failed else f"all {len(findings)} checks passed")
    if absent:
        typer.echo(advice(absent))
    if failed:
        raise typer.Exit(1)
