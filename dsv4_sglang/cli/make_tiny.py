"""`dsv4-sglang make-tiny`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def _parse_ratios(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r}: give compress ratios separated by commas, such as 0,4,128,4") from None


def make_tiny(
    folder: Annotated[Path, typer.Argument(help="Folder to write; made when missing.", metavar="DIR")],
    seed: Annotated[int, typer.Option(help="Equal seeds give equal bytes.")] = 0,
    layers: Annotated[
        str, typer.Option(help="Compress ratio of each layer: 0 (window only), 4 (CSA) or 128 (HCA).")
    ] = "0,4,128,4,128,4",
    hidden: Annotated[int, typer.Option(help="Hidden size, a multiple of 128.")] = 256,
    index_topk: Annotated[int, typer.Option(help="CSA entries that the indexer selects.")] = 512,
    hash_layers: Annotated[int, typer.Option(help="First layers whose experts are chosen by token id.")] = 2,
    context: Annotated[int, typer.Option(help="max_position_embeddings.")] = 32768,
    nextn: Annotated[
        bool, typer.Option("--nextn", help="With a NextN (MTP) block, for --speculative-algorithm EAGLE.")
    ] = False,
    dspark: Annotated[
        int | None, typer.Option(help="With a DSPARK head that drafts this many tokens at once (released: 5).")
    ] = None,
) -> None:
    """Write a small random DeepSeek-V4 checkpoint that SGLang and transformers can read."""
    from dsv4_sglang.testing import tiny

    try:
        spec = tiny.TinySpec(
            seed=seed,
            ratios=_parse_ratios(layers),
            hidden=hidden,
            index_topk=index_topk,
            hash_layers=hash_layers,
            context=context,
            nextn=nextn,
            dspark=dspark,
        )
        tiny.make_tiny(folder, spec)
    except (ValueError, FileExistsError) as error:
        raise typer.BadParameter(str(error)) from None
    size = sum(p.stat().st_size for p in folder.iterdir())
    typer.echo(f"{folder}: {len(spec.ratios)} layers, seed {seed}, {size / 1e6:.0f} MB")
