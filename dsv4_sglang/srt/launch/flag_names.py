"""Rejection of misspelt flags without an import of SGLang, which takes seconds.

SGLang's parser rejects them too, after its import and with the usage of all of its flags.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from dsv4_sglang.srt.launch.error import LaunchError

# Sources of SGLang that declare its flags, relative to its package: as annotated fields, or by `add_argument`.
DECLARATIONS = ("srt/server_args.py", "srt/arg_groups/fields/*.py")
# Similarity from which a flag is suggested.
ALIKE = 0.75
# A word that argparse takes for a flag. Negative numbers and words with spaces are values.
FLAG = re.compile(r"(--?[A-Za-z][^\s=]*)(=.*)?", re.DOTALL)


@cache
def flags_of_sglang() -> frozenset[str]:
    """Return the flags that the installed SGLang declares. Empty if it is not installed or declares them elsewhere."""
    package = find_spec("sglang")
    folders = map(Path, package.submodule_search_locations or ()) if package is not None else ()
    files = [file for folder in folders for pattern in DECLARATIONS for file in folder.glob(pattern)]
    return frozenset(name for file in files for name in _declared(file.read_text(encoding="utf-8")))


def _declared(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "add_argument":
            yield from filter(None, map(_text, node.args))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield from _flags_of_field(node.target.id, node.annotation)


def _flags_of_field(name: str, annotation: ast.expr) -> Iterator[str]:
    """Yield the flags of a field `name: A[type, Arg(...)]`, which SGLang derives from its name by default."""
    if not (isinstance(annotation, ast.Subscript) and getattr(annotation.value, "id", None) == "A"):
        return
    calls = [node for node in ast.walk(annotation.slice) if isinstance(node, ast.Call)]
    arguments = {keyword.arg: keyword.value for call in calls for keyword in call.keywords}
    if "no_cli" in arguments:
        return
    flags = [_text(arguments.get("cli_name")) or "--" + name.replace("_", "-")]
    flags += [_text(alias) or "" for alias in getattr(arguments.get("aliases"), "elts", ())]
    for flag in flags:
        yield flag
        if "action" in arguments:  # a flag that is on or off may have this second form
            yield flag.replace("--", "--no-", 1)


def _text(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def unknown_flags(words: Iterable[str], known: Collection[str], own: Iterable[str] = ()) -> list[str]:
    """Return a reason for each word of a command line that looks like a flag and is none.

    Args:
        words: the command line.
        known: flags of SGLang. A beginning of one counts as the flag, as in SGLang's parser.
        own: flags of this package's command, which a user may have meant.
    """
    reasons = []
    for word in words:
        if not (match := FLAG.fullmatch(word)) or any(flag.startswith(match[1]) for flag in known):
            continue
        long = "--" + match[1].lstrip("-")
        is_short = any(flag.startswith(long) for flag in known)
        near = [long] if is_short else get_close_matches(long, sorted({*known, *own}), 1, ALIKE)
        hint = f"did you mean {near[0]}?" if near else "`python -m sglang.launch_server --help` lists all"
        reasons.append(f"unknown flag {match[1]}; {hint}")
    return reasons


def reject_unknown(words: Iterable[str], own: Iterable[str] = ()) -> None:
    """Raise LaunchError for misspelt flags, unless the installed SGLang declares its flags in an unknown way.

    Args:
        words: the command line.
        own: flags of this package's command.
    """
    known = flags_of_sglang()
    if "--model-path" in known and (reasons := unknown_flags(words, known, own)):
        raise LaunchError(*reasons)
