#!/usr/bin/env bash
# Test the package with a release of SGLang in a fresh environment, and print a table of the results.
#
#   tools/canary.sh VERSION [VENV]
#
# VENV is created, and removed at the end unless it is given. The last lines are the table. The first line names the
# folder of the logs. Exits with 1 if anything fails. CPU recipe, about 20 minutes on 2 idle cores (slow server starts).
set -uo pipefail

release=${1:?usage: tools/canary.sh VERSION [VENV]}
root=$(cd "$(dirname "$0")/.." && pwd)
logs=$(mktemp -d "${TMPDIR:-/tmp}/dsv4-canary-$release.XXXXXX")
venv=${2:-$logs/venv}
[ -n "${2:-}" ] || trap 'rm -rf "$venv"' EXIT
cd "$root"
echo "logs: $logs"

table=()
failed=0
# Run one row of the table: its title and its command. Later rows run even if an earlier one has failed.
try() {
  local what=$1 name=${1//[^a-z0-9]/-} start=$SECONDS state=holds summary
  shift
  "$@" >"$logs/$name.log" 2>&1 || { state=FAILS failed=1; }
  summary=$(grep -E '[0-9]+ (passed|failed|errors?|skipped).* in [0-9.]+s' "$logs/$name.log" | tail -n 1)
  # If the release rejects a feature, its tests are all skipped.
  [[ $summary != *skipped* || $summary =~ passed|failed|error ]] || state=rejected
  table+=("$(printf '%-52s %-7s %5d s  %s' "$what" "$state" $((SECONDS - start)) "$summary")")
  echo "${table[-1]}"
}
tests() { "$venv/bin/python" -m pytest -n 0 -q "$@"; }

# Install the recipe, then the packages that the release pins and the release. torch stays that of the recipe.
install() {
  tools/setup.sh "$venv" cpu || return
  local pip=("$venv/bin/python" -m pip --disable-pip-version-check -q)
  "${pip[@]}" download --no-deps -d "$logs" "sglang==$release" &&
    "$venv/bin/python" tools/sglang_pins.py "$logs/sglang-$release"-*.whl >"$logs/requirements.txt" &&
    "${pip[@]}" install -r "$logs/requirements.txt" &&
    "${pip[@]}" install --no-deps "$logs/sglang-$release"-*.whl
}

try "install" install
if [ "$failed" = 0 ]; then
  try "hooks, overrides and flags (doctor)" "$venv/bin/dsv4-sglang" doctor
  try "contracts, flags, sizes" tests tests/plugin/test_contracts.py tests/plugin/test_flag_validation.py tests/memory/test_sizing_sglang.py
  try "answers of the oracle, retraction, fp32" tests tests/server/test_server_exact.py
  try "prefix hits, fp32" tests tests/server/test_server_prefix.py
  try "prefix hits, fp8 rows" tests tests/server/test_server_fp8_prefix.py
  try "bf16 rows, long chunks, overlap scheduling" tests tests/server/test_server_bf16.py
  try "tensor parallelism" tests tests/server/test_server_tp.py
  try "speculation (eagle)" tests tests/server/test_server_speculation.py
  try "speculation (dspark)" tests tests/server/test_server_dspark.py
  try "dp attention" tests tests/server/test_server_dp.py tests/server/test_server_dp_tp.py
  try "host cache" tests tests/server/test_server_host.py
  try "v4.1" tests tests/server/test_server_v41.py
fi

printf '\nSGLang %s, torch %s\n' "$release" "$("$venv/bin/python" -c 'import torch; print(torch.__version__)' 2>/dev/null || echo '?')"
printf '%s\n' "${table[@]}"
exit "$failed"
