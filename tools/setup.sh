#!/usr/bin/env bash
# Create a virtual environment and install this package with everything that it needs to run and to be tested.
#
#   tools/setup.sh VENV [cpu|cuda]
#
# The default recipe depends on the machine: cuda if nvidia-smi lists a GPU, else cpu.
# It is safe to run this again: an existing VENV is kept and only what is missing is installed.
set -euo pipefail

venv=${1:?usage: tools/setup.sh VENV [cpu|cuda]}
recipe=${2:-}
root=$(cd "$(dirname "$0")/.." && pwd)
sglang=0.5.23
# Its model of DeepSeek-V4.1 is an oracle of the tests (tests/reference/automodel.py).
automodel=0.7.0
# SGLang's pin, and the newest CPU wheel that some mirrors have.
torch=2.14.1
older_torch=2.13.0

if [ -z "$recipe" ]; then
  if nvidia-smi -L 2>/dev/null | grep -q GPU; then recipe=cuda; else recipe=cpu; fi
fi

# Print the first candidate interpreter that runs and whose version satisfies the Python expression $1. Only PYTHON is a
# candidate if it is set.
find_python() {
  local wanted=$1 candidate
  shift
  for candidate in ${PYTHON:-"$@"}; do
    if "$candidate" -c "import sys; v = sys.version_info[:2]; sys.exit(not ($wanted))" 2>/dev/null; then
      command -v "$candidate"
      return 0
    fi
  done
  return 1
}

case $recipe in
  cpu)
    python=$(find_python "v == (3, 11)" python3.11 python3) || {
      echo "setup: the CPU recipe needs Python 3.11 (tools/requirements-cpu.txt is for 3.11); none of" \
        "${PYTHON:-"'python3.11', 'python3'"} is one. Install it, or name it: make setup PYTHON=/path/to/python3.11" >&2
      exit 1
    }
    ;;
  cuda)
    python=$(find_python "(3, 10) <= v <= (3, 13)" python3.12 python3.11 python3.13 python3.10 python3) || {
      echo "setup: needs Python 3.10 to 3.13${PYTHON:+, which $PYTHON is not}. Install one, or name it: make setup PYTHON=/path/to/python3" >&2
      exit 1
    }
    ;;
  *)
    echo "setup: the recipe is 'cpu' or 'cuda', not '$recipe'" >&2
    exit 1
    ;;
esac

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
# Python compiles modules at import. Compiling all of torch, transformers and sglang here takes longer than unpacking.
install() { pip install -q --no-compile "$@"; }

if [ "$recipe" = cuda ]; then
  install -e "$root[dev]" "sglang==$sglang"
else
  # Try a local or mirrored CPU wheel, then PyTorch's own index. PyPI has only the CUDA build, which also runs without a
  # GPU but brings 2.5 GB of libraries.
  install "torch==$torch+cpu" 2>/dev/null ||
    install "torch==$torch+cpu" --index-url https://download.pytorch.org/whl/cpu --retries 1 2>/dev/null ||
    install "torch==$older_torch+cpu" 2>/dev/null ||
    install "torch==$torch"
  installed=$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch").split("+")[0])')
  case $installed in
    2.13.0) torchvision=0.28.0 triton=3.7.1 ;;
    2.14.1) torchvision=0.29.1 triton=3.8.0 ;;
    *)
      echo "setup: $venv has torch $installed; expected $torch or $older_torch. Remove $venv" >&2
      exit 1
      ;;
  esac
  # The first import compiles torch, in the time in which pip waits for downloads.
  "$venv/bin/python" -W ignore -c "import torch" &
  install "triton==$triton" -r "$root/tools/requirements-cpu.txt"
  # Without dependencies, which pin the CUDA build of torch.
  install --no-deps "sglang==$sglang" "torchvision==$torchvision" "nemo-automodel==$automodel"
  "$venv/bin/python" "$root/tools/patch_torchvision_cpu.py"
  install --no-deps --no-build-isolation -e "$root"
fi
"$venv/bin/python" -c "import torch, sglang.version; print('setup: torch', torch.__version__, 'sglang', sglang.version.__version__)"
