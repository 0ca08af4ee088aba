"""`dsv4-sglang make-tiny`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def _parse_ratios(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--layers {text!r}: give compress ratios separated by commas, such as 0,4,128,4") from None


def make_tiny(
    folder: Annotated[Path, typer.Argument(help="Output folder, created if missing.", metavar="DIR")],
    seed: Annotated[int, typer.Option(help="Equal seeds give equal bytes.")] = 0,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Compress ratio of each layer: 0 (window only), 4 (CSA) or 128 (HCA).", show_default="0,4,128,4,128,4"
        ),
    ] = None,
    hidden: Annotated[int, typer.Option(help="Hidden size, a multiple of 128.")] = 256,
    index_topk: Annotated[int, typer.Option(help="CSA entries that the indexer selects per token.")] = 512,
    hash_layers: Annotated[
        int | None, typer.Option(help="First layers that choose experts by token id.", show_default="2")
    ] = None,
    context: Annotated[int, typer.Option(help="max_position_embeddings.")] = 32768,
    nextn: Annotated[
        bool, typer.Option("--nextn", help="Add a NextN (MTP) block, for --speculative-algorithm EAGLE.")
    ] = False,
    dspark: Annotated[
        int | None, typer.Option(help="Add a DSPARK head that drafts N tokens at once (released: 5).")
    ] = None,
    v41: Annotated[
        bool, typer.Option("--v41", help="DeepSeek-V4.1 with eight layers of all its kinds, for SGLang 0.5.23.")
    ] = False,
) -> None:
    """Write small random DeepSeek-V4 or V4.1 weights that SGLang and transformers can load."""
    from dsv4_sglang.testing import tiny, tiny_v41

    sizes: dict[str, Any] = {"seed": seed, "hidden": hidden, "index_topk": index_topk, "context": context}
    try:
        ratios = layers and _parse_ratios(layers)
        chosen: dict[str, Any] = {"ratios": ratios, "hash_layers": hash_layers, "nextn": nextn, "dspark": dspark}
        given = {name: value for name, value in chosen.items() if value is not None and value is not False}
        if not v41:
            tiny.make_tiny(folder, spec := tiny.TinySpec(**sizes, **given))
            count = len(spec.ratios)
        elif given:
            flags = ", ".join("--" + {"ratios": "layers"}.get(name, name).replace("_", "-") for name in given)
            raise ValueError(
                f"{flags} with --v41: the layers of a tiny V4.1 are fixed and it has no drafts; leave it out"
            )
        else:
            tiny_v41.make_tiny_v41(folder, tiny_v41.TinyV41Spec(**sizes))
            count = len(tiny_v41.RATIOS)
    except (ValueError, OSError) as error:
        # The error of the system names neither the path nor what to do.
        system = error.strerror if isinstance(error, OSError) else None
        reason = f"cannot write {folder} ({system}); give a folder that can be created" if system else error
        typer.echo(f"dsv4-sglang make-tiny: {reason}", err=True)
        raise typer.Exit(2) from None
    size = sum(p.stat().st_size for p in folder.iterdir())
    typer.echo(f"{folder}: {count} layers, seed {seed}, {size / 1e6:.0f} MB")
