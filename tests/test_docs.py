"""References in pages and comments exist (sections of the cache mathematics, links, files); imports point one way."""

import re
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ("dsv4_sglang", "csrc", "tests", "benchmarks", "docs", "examples")
SUFFIXES = {".py", ".cu", ".cuh", ".h", ".cpp", ".md"}
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
SPEC = ROOT / "docs" / "design" / "cache_mathematics.md"

NUMBER = r"\d+(?:\.\d+)?"
# "SPEC 2.1, 2.4 and 3.1 to 3.7".
CITATION = re.compile(rf"\bSPEC ({NUMBER}(?:(?:, | and | to |, and ){NUMBER}\b)*)")
HEADING = re.compile(rf"^##+ ({NUMBER})\b", re.MULTILINE)
FILE = re.compile(r"`((?:dsv4_sglang|csrc|tests|benchmarks|examples|docs|tools)/[\w./]*)`")
# Pages of docs/design name modules relative to the package.
MODULE = re.compile(r"`((?:model|formats|ops|cache|attention|standalone|testing|srt|planner|cli)/[\w./]*)`")
IMPORT = re.compile(r"^\s*(?:from|import) dsv4_sglang\.(\w+)", re.MULTILINE)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|<(?:img|source)\b[^>]*?\bsrc(?:set)?=\"([^\"]+)\"")


def citations(text: str) -> list[str]:
    """Return the numbers of cited sections; a comment may break its line inside a citation."""
    joined = re.sub(r"\n[ \t]*(?:///?|#|\*)?[ \t]*", " ", text)
    return [number for match in CITATION.finditer(joined) for number in re.findall(NUMBER, match[1])]


def page_name(page: Path) -> str:
    """The id of a page's tests; pages of different folders may share a file name."""
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings as GitHub names them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# of both (SPEC 4.3).", ["4.3"]),
        ("// (SPEC 2.1, 2.4, 2.5, 3.1 to 3.7).", ["2.1", "2.4", "2.5", "3.1", "3.7"]),
        ('"""SPEC 5.2 and 5.3: 584 B"""', ["5.2", "5.3"]),
        ("    /// fake-quantised (SPEC\n    /// 2.5, 4.1).", ["2.5", "4.1"]),
        ("from the tests that SPEC 8 requires, SPEC 1.3, at which", ["8", "1.3"]),
        ("SPECIALS 3.1, a SPEC of 2 parts", []),
    ],
)
def test_citations_are_found(text: str, expected: list[str]) -> None:
    assert citations(text) == expected


def test_every_cited_section_of_the_specification_exists() -> None:
    known = set(HEADING.findall(SPEC.read_text()))
    files = [f for f in chain.from_iterable((ROOT / s).rglob("*") for s in SOURCES) if f.suffix in SUFFIXES]
    cited = {
        (number, str(file.relative_to(ROOT)))
        for file in [*files, ROOT / "README.md"]
        if file != Path(__file__)
        for number in citations(file.read_text())
    }
    assert len(cited) > 50, "the citations are no longer found"
    assert not sorted(c for c in cited if c[0] not in known)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_relative_links_resolve(page: Path) -> None:
    broken = []
    for match in LINK.finditer(page.read_text()):
        path, _, anchor = (match[1] or match[1]).partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(match[0])
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_named_files_exist(page: Path) -> None:
    text = page.read_text()
    named = [ROOT / path for path in FILE.findall(text)]
    if page.parent == SPEC.parent:
        named += [ROOT / "dsv4_sglang" / path for path in MODULE.findall(text)]
    assert not [str(path.relative_to(ROOT)) for path in named if not path.exists()]


def test_nothing_reaches_the_cache_without_a_server() -> None:
    """No other package names `standalone`, in an import or in a string, so no server loads it."""
    package = ROOT / "dsv4_sglang"
    sources = [file for file in package.rglob("*.py") if file.relative_to(package).parts[0] != "standalone"]
    named = re.compile(r"^\s*(from|import) dsv4_sglang\b.*\bstandalone\b|[\"']dsv4_sglang\.standalone", re.MULTILINE)
    assert not [str(file.relative_to(ROOT)) for file in sources if named.search(file.read_text())]


def test_packages_import_in_the_order_of_the_architecture_page() -> None:
    """A package imports from those listed above it; docs/design/architecture.md lists them all."""
    page = (ROOT / "docs" / "design" / "architecture.md").read_text()
    order = re.findall(r"^\| `dsv4_sglang/(\w+)`", page, re.MULTILINE)
    folders = {folder.name for folder in (ROOT / "dsv4_sglang").iterdir() if list(folder.glob("*.py"))}
    assert set(order) == folders
    wrong = [
        f"{file.relative_to(ROOT)} imports {name}"
        for place, package in enumerate(order)
        for file in (ROOT / "dsv4_sglang" / package).rglob("*.py")
        for name in IMPORT.findall(file.read_text())
        if name in order[place + 1 :]
    ]
    assert not wrong
