"""`dsv4-sglang make-tiny`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def make_tiny(
    folder: Annotated[Path, typer.Argument(help="Output folder, created if missing.", metavar="DIR")],
    seed: Annotated[int, typer.Option(help="Equal seeds give equal bytes.")] = 0,
    nextn: Annotated[
        bool, typer.Option("--nextn", help="Add a NextN (MTP) block, for --speculative-algorithm EAGLE.")
    ] = False,
    dspark: Annotated[
        int | None, typer.Option(help="Add a DSPARK head that drafts N tokens at once (released: 5).")
    ] = None,
    v41: Annotated[bool, typer.Option("--v41", help="DeepSeek-V4.1 with eight layers of all its kinds.")] = False,
) -> None:
    """Write small random DeepSeek-V4 or V4.1 weights that SGLang and transformers can load.

    `dsv4_sglang.testing.tiny` makes models of other sizes.
    """
    from safetensors import SafetensorError

    from dsv4_sglang.testing import tiny, tiny_v41
    from dsv4_sglang.testing.tiny_config import TinySpec

    try:
        if not v41:
            spec = TinySpec(seed=seed, nextn=nextn, dspark=dspark)
            tiny.make_tiny(folder, spec)
            count = len(spec.ratios)
        elif nextn or dspark is not None:
            raise ValueError("--nextn or --dspark with --v41: a tiny V4.1 has no drafts; leave it out")
        else:
            tiny_v41.make_tiny_v41(folder, tiny_v41.TinyV41Spec(seed=seed))
            count = len(tiny_v41.RATIOS)
    except (ValueError, OSError, SafetensorError) as error:
        # The error of the system names neither the path nor what to do.
        system = error.strerror if isinstance(error, OSError) else error if isinstance(error, SafetensorError) else None
        advice = "give a folder that can be written, on a disk with 100 MB of free space"
        reason = f"cannot write {folder} ({system}); {advice}" if system else error
        typer.echo(f"dsv4-sglang make-tiny: {reason}", err=True)
        raise typer.Exit(2) from None
    size = sum(p.stat().st_size for p in folder.iterdir())
    typer.echo(f"{folder}: {count} layers, seed {seed}, {size / 1e6:.0f} MB")
