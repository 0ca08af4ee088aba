"""Run benchmarks one after the other, each in its own process: `python -m benchmarks.run [NAME ...] [--full] ...`.

Without names, run all. The default is their short sets. Results go to benchmarks/results/, from which the plots of
docs/benchmarks/ are drawn, or to the folder of --out.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from benchmarks.environment import ROOT

# Programs without a server.
NAMES = ("append", "attend", "index", "step", "move", "tier", "capacity")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", help=f"some of {', '.join(NAMES)} (default: all)")
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
    for name in args.names or NAMES:
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
