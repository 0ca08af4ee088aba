#!/usr/bin/env bash
# Install WHEEL into a fresh environment and run it with an empty PATH, that is, without a compiler.
#
#   tools/try_wheel.sh PYTHON WHEEL
#
# PYTHON's environment has torch and may have SGLang. The fresh environment sees its packages, except an editable
# install of this package; other dependencies of the command are installed. With SGLang, `dsv4-sglang doctor` runs too.
set -euo pipefail
python=${1:?usage: tools/try_wheel.sh PYTHON WHEEL}
wheel=${2:?usage: tools/try_wheel.sh PYTHON WHEEL}
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT

"$python" -m venv "$fresh/venv"
bin=$fresh/venv/bin
packages='import sysconfig; print(sysconfig.get_path("purelib"))'
"$python" -c "$packages" >"$("$bin/python" -c "$packages")/base.pth"
"$bin/python" -m pip --disable-pip-version-check install -q --no-deps --ignore-installed "$wheel"
"$bin/python" -m pip --disable-pip-version-check install -q packaging pyyaml typer

cd "$fresh"
try() { env -i HOME="$fresh" "$bin/$@"; }
installed=$(try python -c "import dsv4_sglang; print(dsv4_sglang.__file__)")
[[ $installed == "$fresh"/* ]] || { echo "try_wheel: $installed was imported, not the wheel" >&2; exit 1; }
try dsv4-sglang --help >help.txt
grep -q serve help.txt
# A compiled library is found by the hash of the wheel's sources.
try python - <<'PYTHON'
from dsv4_sglang.ops import extension

for library in extension.PREBUILT.glob("*.so"):
    for arch in library.stem.rsplit("-", 1)[1].split("_"):
        assert extension.find_library(arch.removeprefix("sm"), extension.PREBUILT) == library, f"{library.name} is not found for {arch}"
        print(f"try_wheel: kernels for {arch} are found")
PYTHON
if try python -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('sglang') is None)"; then
  try dsv4-sglang doctor
fi
echo "try_wheel: $(basename "$wheel") works on $("$bin/python" -VV | cut -d' ' -f1,2)"
