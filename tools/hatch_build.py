"""Build hook: compile the CUDA extension ahead of time when DSV4_SGLANG_PREBUILD names the architectures.

    DSV4_SGLANG_PREBUILD=80,89,90a,100a,120a pip install --no-build-isolation .

Without the variable nothing is compiled, and the extension is built on first use.
"""

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SWITCH = "DSV4_SGLANG_PREBUILD"


class ExtensionBuildHook(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        archs = os.environ.get(SWITCH)
        if not archs or self.target_name != "wheel":
            return
        if importlib.util.find_spec("torch") is None:
            raise RuntimeError(
                f"{SWITCH} compiles against torch's headers, and this build environment has no torch: install torch "
                "and give pip --no-build-isolation"
            )
        # Outside of the package: a checkout would load this library instead of one built from its own sources.
        out = Path(self.root) / "build" / "extension"
        command = [sys.executable, "-m", "dsv4_sglang.ops.extension", "--arch", archs, "--out", str(out)]
        library = subprocess.run(command, cwd=self.root, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
        build_data["force_include"][library] = f"dsv4_sglang/prebuilt/{Path(library).name}"
        build_data["pure_python"] = False
        # The library uses torch's stable ABI and no Python API, so one wheel serves all supported interpreters. The
        # platform is this machine's. `make wheels` replaces it by the manylinux tag that the library's symbols allow.
        build_data["tag"] = f"cp310-abi3-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
