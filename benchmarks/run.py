"""Run benchmarks one after the other, each in its own process: `python benchmarks/run.py [NAME ...] [--full] ...`.

Without names, run all benchmarks that need no server. The default is their short sets. Results go to
benchmarks/results/, from which the plots of docs/benchmarks/ are drawn, or to the folder of --out.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("append", "attend", "index", "step", "move", "tier", "serve", "capacity", "oracle_distance")
WITHOUT_SERVER = ("append", "attend", "index", "step", "move", "tier", "capacity")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", help=f"some of {', '.join(NAMES)} (default: {', '.join(WITHOUT_SERVER)})")
    options.add_argument("--full", action="store_true", help="all sizes instead of the short sets")
    options.add_argument("--out", help="folder of the JSON files instead of benchmarks/results/")
    options.add_argument("--dry-run", action="store_true", help="smallest sizes on the CPU, without the peers' kernels")
    options.add_argument("--parts", help="only parts whose name contains one of these, separated by commas")
    args = options.parse_args()
    unknown = [name for name in args.names if name not in NAMES]
    if unknown:
        options.error(f"unknown benchmark {unknown[0]}; expected some of {', '.join(NAMES)}")
    rest = [] if args.full else ["--quick"]
    rest += ["--dry-run"] if args.dry_run else []
    for name in ("out", "parts"):
        rest += [f"--{name}", getattr(args, name)] if getattr(args, name) else []
    failed = []
    for name in args.names or WITHOUT_SERVER:
        command = [sys.executable, "-m", f"benchmarks.{name}", *rest]
        print("$", " ".join(command), flush=True)
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            failed.append(name)
    if args.out is None and not args.dry_run:
        subprocess.run([sys.executable, "-m", "benchmarks.plots"], cwd=ROOT, check=False)
    if failed:
        print("without a result:", ", ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
