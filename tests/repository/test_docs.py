"""References in pages and comments exist (sections of the cache mathematics, links, files).

Imports follow the package order.
"""

import ast
import json
import re
from itertools import chain, product
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.plots import load_of
from dsv4_sglang.srt.memory.sizing import SNAPSHOT_SHARE

ROOT = Path(__file__).parents[2]
SOURCES = ("dsv4_sglang", "csrc", "tests", "benchmarks", "docs", "examples")
SUFFIXES = {".py", ".cu", ".cuh", ".h", ".cpp", ".md"}
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "tests").rglob("*.md"))]
SPEC = ROOT / "docs" / "design" / "cache_mathematics.md"

NUMBER = r"\d+(?:\.\d+)?"
# "SPEC 2.1, 2.4 and 3.1 to 3.7".
CITATION = re.compile(rf"\bSPEC ({NUMBER}(?:(?:, | and | to |, and ){NUMBER}\b)*)")
HEADING = re.compile(rf"^##+ ({NUMBER})\b", re.MULTILINE)
FILE = re.compile(r"`((?:dsv4_sglang|csrc|tests|benchmarks|examples|docs|tools)/[\w./]*)`")
# Pages of docs/design name modules relative to the package.
MODULE = re.compile(r"`((?:model|formats|ops|cache|attention|standalone|testing|srt|planner|cli)/[\w./]*)`")
IMPORT = re.compile(r"^\s*(?:from|import) dsv4_sglang\.(\w+)", re.MULTILINE)
PACKAGE_OF_SRT = re.compile(r"dsv4_sglang\.srt\.(\w+)")
# 7 to 40 hexadecimal digits with at least one decimal digit and one letter.
COMMIT = re.compile(r"(?<![\w.])(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,40}\b")
CODE = re.compile(r"^```.*?^```|^    .*?$", re.MULTILINE | re.DOTALL)
# A command in an indented code block, with its continuation lines.
COMMAND = re.compile(
    r"^    (?:(?:[A-Z_]+=\S+ )*(?:dsv4-sglang|python|make|docker|curl|pip|pipx|tools/\S+) (?:.*\\\n)*.*)$", re.MULTILINE
)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|<(?:img|source)\b[^>]*?\bsrc(?:set)?=\"([^\"]+)\"")


def citations(text: str) -> list[str]:
    """Return the numbers of cited sections. A citation in a comment may contain a line break."""
    joined = re.sub(r"\n[ \t]*(?:///?|#|\*)?[ \t]*", " ", text)
    return [number for match in CITATION.finditer(joined) for number in re.findall(NUMBER, match[1])]


def page_name(page: Path) -> str:
    """Return the test id of a page. Pages of different folders may share a file name."""
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings as GitHub names them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


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


def broken_links(page: Path) -> list[str]:
    """Return the relative links and images of a page whose target or anchor does not exist."""
    broken = []
    for match in LINK.finditer(page.read_text()):
        path, _, anchor = (match[1] or match[2]).partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(path or anchor)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_relative_links_resolve(page: Path) -> None:
    assert not broken_links(page)


def test_broken_links_and_images_are_seen(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A title\n")
    page = tmp_path / "page.md"
    sound = '[a](there.md) ![b](there.md) [c](there.md#a-title) [d](https://x/y) <img src="there.md">'
    page.write_text(
        f'{sound} [e](gone1) ![f](gone2) <img a="" src="gone3"> <source srcset="gone4"> [g](#gone5) [h](there.md#b)'
    )
    assert broken_links(page) == ["gone1", "gone2", "gone3", "gone4", "gone5", "there.md"]


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_named_files_exist(page: Path) -> None:
    text = page.read_text()
    named = [ROOT / path for path in FILE.findall(text)]
    if page.parent == SPEC.parent:
        named += [ROOT / "dsv4_sglang" / path for path in MODULE.findall(text)]
    assert not [str(path.relative_to(ROOT)) for path in named if not path.exists()]


def words(page: Path) -> int:
    """Return the number of words of a page as `wc -w` counts them."""
    return len(page.read_text().split())


def test_pages_are_short() -> None:
    assert words(ROOT / "README.md") <= 900
    assert sum(map(words, (ROOT / "docs").rglob("*.md"))) <= 18_000


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_pages_name_no_commits(page: Path) -> None:
    assert not COMMIT.findall(CODE.sub("", page.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_cells_of_tables_are_short(page: Path) -> None:
    """A cell is at most one line, not counting the targets of links."""
    rows = re.findall(r"^\|(.*)\|$", page.read_text(), re.MULTILINE)
    cells = [re.sub(r"\]\([^)]*\)", "]", cell).strip() for row in rows for cell in row.split(" | ")]
    assert not [cell for cell in cells if len(cell) > 120]


def test_commands_fit_into_80_columns() -> None:
    """The four columns of the indentation do not count."""
    lines = [line for page in PAGES for command in COMMAND.findall(page.read_text()) for line in command.splitlines()]
    assert len(lines) > 50, "the commands are no longer found"
    assert not [line for line in lines if len(line) > 84]


def test_the_site_has_every_page() -> None:
    navigation = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(navigation) == sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))


# The main figures as in the benchmark files: page, row, files, filter on their rows, field, format.
README, RESULTS = ROOT / "README.md", ROOT / "docs" / "benchmarks" / "results.md"
LOAD, LIMITS = ROOT / "docs" / "benchmarks" / "load.md", ROOT / "docs" / "benchmarks" / "limits.md"
HINTS = ROOT / "docs" / "guides" / "hints.md"
DECODE, TOKENS, FIRST = "decode tokens/s", "tokens in the cache", "TTFT ms"
FLASH, TP4, DP4 = "turns_v4flash_tp2", "turns_v4flash_fp4_tp4", "turns_v4flash_fp4_dp4"
EAGLE = "serve_eagle3_v4flash_tp2", f"{TP4}_eagle", f"{DP4}_eagle"
AGENTS = {"scenario": "trace", "part": "155 conversations"}
V41 = "turns_v41wide"
# Servers of the columns.
COLUMNS = ("ours",), ("in-tree", "sglang-best")
V41_COLUMNS = {
    README: (("ours",), ("sglang-best-full",), ("sglang-best-tails",)),
    RESULTS: (("ours",), ("sglang-best-full",), ("sglang",), ("sglang-best-tails",)),
}
FIGURES = [
    (README, "tokens in the cache", (FLASH, TP4), {"measure": TOKENS}, "value", "{:.1f} M"),
    *(
        (
            README,
            f"decode tokens/s, {n}",
            (FLASH, TP4),
            {"measure": DECODE, "at": int(n.split()[0])},
            "value",
            "{:,.0f}",
        )
        for n in ("1 request", "256 requests")
    ),
    *(
        (README, label, (FLASH, TP4), {"load": f"20000+{load}"}, "first_token_ms", form)
        for label, load, form in (
            ("first token of a prefix hit, 200 new tokens, p50/p95", "200x1", "{:.1f}/{:.1f} ms"),
            ("first token of 8 such hits at once", "200x8", "{:,.0f}/{:,.0f} ms"),
        )
    ),
    *(
        (RESULTS, label, (FLASH,), {"load": f"20000+{load}"}, "first_token_ms", form)
        for label, load, form in (
            ("200 x 1", "200x1", "{:.1f}/{:.1f} ms"),
            ("1,000 x 1", "1000x1", "{:.1f}/{:.1f} ms"),
            ("200 x 8", "200x8", "{:.0f}/{:.0f} ms"),
        )
    ),
    (RESULTS, "time to first token, prompt of 64K", (FLASH,), {"measure": FIRST, "at": 65536}, "value", "{:,.0f} ms"),
    (RESULTS, "tokens in the cache", (FLASH,), {"measure": TOKENS}, "value", "{:,.0f}"),
    *(
        (RESULTS, f"decode tokens/s, {n} requests", names, {"measure": DECODE, "at": n}, "value", "{:,.0f}")
        for names, sizes in (((FLASH,), (16, 64, 256)), ((TP4, DP4), (64, 256)))
        for n in sizes
    ),
    (RESULTS, "tokens in all caches", (TP4, DP4), {"measure": TOKENS}, "value", "{:,.0f}"),
    (RESULTS, "decode tokens/s, 1 request", (TP4, DP4), {"measure": DECODE, "at": 1}, "value", "{:,.1f}"),
    *(
        (RESULTS, f"time to first token, prompt of {n}K", (TP4, DP4), wanted, "value", "{:,.0f} ms")
        for n, wanted in ((n, {"measure": FIRST, "at": 1024 * n}) for n in (8, 64))
    ),
    *(
        (RESULTS, label, (TP4, DP4), {"load": f"20000+200x{n}"}, "first_token_ms", form)
        for label, n, form in (
            ("first token of a hit", 1, "{:.1f}/{:.1f} ms"),
            ("8 hits at once", 8, "{:,.0f}/{:,.0f} ms"),
            ("32 hits at once", 32, "{:,.0f}/{:,.0f} ms"),
        )
    ),
    *(
        (RESULTS, f"{n} clients, 8K in, 1K out, tokens/s/GPU", names, {"load": f"8192+1024x{n}"}, "value", "{:,.0f}")
        for n, names in ((16, (TP4,)), (64, (TP4, DP4)))
    ),
    *(
        (RESULTS, label, (f"{TP4}_host",), {"load": f"20000+200x{n}"}, "first_token_ms", form)
        for label, n, form in (
            ("first token of a hit from the host", 1, "{:.1f}/{:.1f} ms"),
            ("8 hits from the host at once", 8, "{:,.0f}/{:,.0f} ms"),
        )
    ),
    (LOAD, "agents, 1.56 M live tokens: hits, %", ("prefix_trace",), AGENTS, "hit_of_ideal", "{:.1%}"),
    (README, "tokens in the cache with EAGLE, 3 drafts", EAGLE[:2], {"measure": TOKENS}, "value", "{:.1f} M"),
    (README, "tokens in the cache", (V41,), {"measure": TOKENS}, "value", "{:.1f} M"),
    (README, "first token of a hit, 200 new tokens", (V41,), {"load": "20000+200x1"}, "first_token_ms", "{:.0f} ms"),
    (RESULTS, "first token of a hit", (V41,), {"load": "20000+200x1"}, "first_token_ms", "{:.1f}/{:.1f} ms"),
    (README, "time to first token, 8K prompt", (V41,), {"measure": FIRST, "at": 8192}, "value", "{:,.0f} ms"),
    (README, "time to first token, 64K prompt", (V41,), {"measure": FIRST, "at": 65536}, "value", "{:,.0f} ms"),
    (RESULTS, "tokens in the cache", (V41,), {"measure": TOKENS}, "value", "{:,.0f}"),
    (RESULTS, "time to first token, prompt of 8K", (V41,), {"measure": FIRST, "at": 8192}, "value", "{:,.0f} ms"),
    (RESULTS, "time to first token, prompt of 64K", (V41,), {"measure": FIRST, "at": 65536}, "value", "{:,.0f} ms"),
    (RESULTS, "decode tokens/s, 1 request", (V41,), {"measure": DECODE, "at": 1}, "value", "{:,.1f}"),
    *(
        (page, f"decode tokens/s, {n} requests", (V41,), {"measure": DECODE, "at": n}, "value", "{:,.0f}")
        for page in (README, RESULTS)
        for n in (16, 64)
    ),
]


def unwrapped(page: Path) -> str:
    """Return the text of a page on one line."""
    return " ".join(page.read_text().split())


def rows_of(name: str) -> list[dict]:
    """Return the rows of a result, each with the server's subject."""
    file = ROOT / "benchmarks" / "results" / f"{name}.json"
    if file.exists():
        return json.loads(file.read_text())["rows"]
    lines = [json.loads(line) for line in file.with_suffix(".jsonl").read_text().splitlines()]
    untuned = [line for line in lines if "--swa-full-tokens-ratio" not in line["server"].get("flags", "")]
    return [line | {"subject": line["server"]["subject"]} for line in untuned]


@pytest.mark.parametrize(("page", "label", "names", "wanted", "field", "form"), FIGURES)
def test_figures_are_those_of_the_results(
    page: Path, label: str, names: tuple[str, ...], wanted: dict, field: str, form: str
) -> None:
    cells = []
    columns = V41_COLUMNS[page] if names == (V41,) else COLUMNS
    for name, subjects in product(names, columns):
        rows = [row for row in rows_of(name) if row["subject"] in subjects and wanted.items() <= row.items()]
        starts = rows if "start" in rows[-1] else rows[-1:]
        spread = [
            row[field] if isinstance(row[field], dict) else {"p50": row[field], "p95": row[field]} for row in starts
        ]
        values = [fmean(row[quantile] for row in spread) for quantile in ("p50", "p95")]
        millions = form.endswith(" M")
        cells.append(form.format(*(value / 1e6 if millions else value for value in values)).removesuffix("%"))
    assert f"| {label} | {' | '.join(cells)} |" in page.read_text()


@pytest.mark.parametrize(
    ("label", "at", "field", "form"),
    [
        ("tokens in the cache, million", None, "value", "{:.2f}/{:.2f}"),
        *(
            (f"speculative round, {n} request{'s' * (n > 1)}", n, "step_ms", "{:.1f}/{:.1f} ms")
            for n in (1, 16, 64, 256)
        ),
    ],
)
def test_figures_of_speculation(label: str, at: int | None, field: str, form: str) -> None:
    cells = []
    for name in EAGLE:
        wanted = {"measure": DECODE, "at": at} if at else {"measure": TOKENS}
        of = {row["subject"]: row[field] for row in rows_of(name) if wanted.items() <= row.items()}
        ours, sglang = (next(of[subject] for subject in subjects if subject in of) for subjects in COLUMNS)
        cells.append(form.format(ours, sglang) if at else form.format(ours / 1e6, sglang / 1e6))
    assert f"| {label} | {' | '.join(cells)} |" in RESULTS.read_text()


def test_figures_of_a_million_tokens() -> None:
    columns: list[dict[str, str]] = []
    for subject, drafts, tier in (
        ("ours", 0, "device"),
        ("sglang-best", 0, "device"),
        ("ours", 3, "device"),
        ("ours", 0, "host"),
    ):
        found = [
            row
            for row in rows_of("long_context")
            if (row["subject"], row["settings"]["speculate"], row["settings"]["tier"]) == (subject, drafts, tier)
        ]
        rows = {(row["measure"], row.get("new", row.get("at"))): row for row in found}
        first = {key: row["first_token_ms"] for key, row in rows.items() if "first_token_ms" in row}
        cold = [row["value"] / 1e3 for row in found if row["measure"] == "cold"]
        column = {
            "cold prompts": f"{cold[0]:.1f}, {cold[1]:.1f} s",
            "two conversations in turn, 200 new tokens": "{p50:.0f}/{p95:.0f} ms".format(**first["two in turn", 200]),
        }
        if tier == "device":
            turn = first["turn", 200]
            long = {quantile: value / 1e3 for quantile, value in first["turn", 8160].items()}
            column |= {
                "first token of the next turn, 200 new tokens": "{p50:.0f}/{p95:.0f} ms".format(**turn),
                "first token behind a prefill step of 8,192": "{p50:.2f}/{p95:.2f} s".format(**long),
                "decode tokens/s, 1, 4, 16 requests that share it": ", ".join(
                    f"{rows[DECODE, n]['value']:,.0f}" for n in (1, 4, 16)
                ),
            }
        if not columns:
            readme = f"starts after {turn['p50'] / 1e3:.2f} s (cold: {fmean(cold):.0f} s)"
            assert readme in README.read_text()
        columns.append(column)
    for label in columns[0]:
        cells = [column.get(label, "") for column in columns]
        assert f"| {label} | {' | '.join(cells)} |".replace("|  |", "| |") in RESULTS.read_text()


def test_figures_of_disaggregation() -> None:
    sides = []
    for name in ("apart", "tp"):
        rows = {(row["measure"], row.get("at")): row for row in rows_of(f"disaggregation_{name}")}
        new, found = (
            [rows["transfer", f"{n} {at}"]["TTFT ms"] for n in (8192, 65536)] for at in ("new", "in the cache")
        )
        alone, beside = (rows["decode", at] for at in ("undisturbed", "4 x 8192 a second"))
        sides.append(
            (
                "{:,.0f}, {:,.0f} ms".format(*new),
                "{:.1f}, {:.1f} ms".format(*found),
                f"{alone['tokens/s']:,.0f}, {beside['tokens/s']:,.0f}",
                f"{alone['p99']:.1f}, {beside['p99']:.1f} ms",
            )
        )
    labels = (
        "time to first token, prompts of 8K and 64K",
        "first token of their hits",
        "decode tokens/s, alone and beside the prompts",
        "p99 between tokens",
    )
    for label, apart, together in zip(labels, *sides, strict=True):
        assert f"| {label} | {apart} | {together} |" in RESULTS.read_text()


def test_figures_of_a_shared_host_cache() -> None:
    text = unwrapped(RESULTS)
    (memory,) = [row for row in rows_of("host_cache_tp2") if "copies" in row]
    assert f"use one copy: {memory['value'] / 1e6:.2f} M tokens per GB" in text
    assert round(memory["copies"], 2) == 1
    (sglang,) = [row for row in rows_of("host_cache_tp2") if row["subject"] == "sglang"]
    assert f"SGLang has two: {sglang['value'] / 1e6:.2f} M by its log" in text
    rates = {(row["tier"], row["at"]): row["value"] for row in rows_of("host_cache_tp2") if "tier" in row}
    of_64, of_256 = (100 * rates["host cache", n] / rates["no host cache", n] for n in (64, 256))
    assert f"Decode is {of_64:.1f} % (64 requests) and {of_256:.1f} % (256) of that without" in text


@pytest.mark.parametrize(("label", "at"), [("from memory (`shm`)", "shm"), ("from files", "file"), ("cold", "cold")])
def test_figures_of_restarts(label: str, at: str) -> None:
    cells = []
    for subject in ("ours", "sglang"):
        times = [
            row["first_token_ms"]
            for row in rows_of("host_cache_restart_tp2")
            if (row["subject"], row["at"]) == (subject, at)
        ]
        p50, p95 = ([time[quantile] for time in times] for quantile in ("p50", "p95"))
        cells.append(f" {fmean(p50):,.0f}/{fmean(p95):,.0f} ms" if times else "")
    assert f"| {label} |{' |'.join(cells)} |" in RESULTS.read_text()


def test_figures_of_simulated_resume_points() -> None:
    rows = rows_of("prefix_simulation_trace")
    served = [row for row in rows if row["share"] == SNAPSHOT_SHARE]
    text = unwrapped(LOAD)
    for sentence, case in (
        (
            "chats without earlier reasoning hit {:.1f} % ({:.1f} % without learning)",
            {"repeated": "none", "gigabytes": 4},
        ),
        ("Mooncake's trace in twice its live tokens {:.1f} % ({:.1f} %)", {"part": "trace", "live": 0.5}),
    ):
        found = {row["learns"]: 100 * row["hit"] for row in served if case.items() <= row.items()}
        assert sentence.format(found[True], found[False]) in text


def test_figures_of_a_larger_share_of_snapshots() -> None:
    hits = {
        row["share"]: 100 * row["hit"]
        for row in rows_of("prefix_simulation")
        if row["part"] == "share" and (row["active"], row["tokens"]) == (800, [2000, 8000])
    }
    text = unwrapped(ROOT / "docs" / "reference" / "options.md")
    assert (
        f"800 chats of 2,000 to 8,000 tokens hit {hits[0.32]:.1f} % instead of {hits[0.08]:.1f} % (simulated)" in text
    )


def loads_of_agents() -> dict[str, list[dict]]:
    """Return the rows of this package and of SGLang of each load of `benchmarks.trace`."""
    rows = {(load_of(row), row["subject"]): row for row in rows_of("trace")}
    return {load: [rows[load, subject] for subject in ("ours", "sglang-best")] for load, _ in rows}


def test_figures_of_agents_under_load() -> None:
    loads = loads_of_agents()
    labels = {
        "open loop, 1x": "open loop, 60 agents",
        "open loop, 2x": "the same, twice the rate",
        "30 clients": "closed loop, 30 agents",
        "93 clients": "93 agents",
        "93 clients, shortest-prefill-first": "93 agents, `shortest-prefill-first`",
        "39 clients, host cache": "39 agents, host cache",
        "154 clients, host cache": "154 agents, host cache",
        "386 clients, host cache": "386 agents, host cache",
    }
    text = unwrapped(LOAD)
    assert loads.keys() == labels.keys()
    for load, label in labels.items():
        pair = loads[load]
        cells = [label, "/".join(f"{row['live_tokens'] / 1e6:.2f}" for row in pair)]
        cells.append("/".join(f"{row['requests_per_s']:.1f}" for row in pair))
        cells.append("/".join(f"{100 * row['hit_of_ideal']:.1f}" for row in pair))
        for quantile in ("p50", "p95"):
            seconds = (row["first_token_ms"][quantile] / 1e3 for row in pair)
            cells.append(
                "/".join(f"{s:.0f}" if s > 10 else f"{s:.1f}" if s > 1 else f"{s:.2g}" for s in seconds) + " s"
            )
        assert f"| {' | '.join(cells)} |" in text


def test_memory_and_misses_of_agents_under_load() -> None:
    loads, text = loads_of_agents(), unwrapped(LOAD)

    def held(load: str) -> list[list[float]]:
        """Return the millions of tokens on the device, then on the host if there is a cache, ours and SGLang's."""
        tiers = []
        for row in loads[load]:
            device, *both = (int(tokens) / 1e6 for tokens in row["bounded_ideal_tokens"])
            tiers.append([device, *(tokens - device for tokens in both)])
        return tiers

    (ours,), (theirs,) = held("93 clients")
    assert f"{ours:.2f} M tokens, SGLang {theirs:.2f} M" in text
    for load in (load for load in loads if "host cache" in load):
        gigabytes = [row["server"]["host_gb"] for row in loads[load]]
        assert gigabytes[1] == pytest.approx(gigabytes[0], rel=0.03)
        (ours, on_host), (theirs, on_their_host) = held(load)
        assert (
            f"Host caches have {gigabytes[0]:.0f} GB, {on_host:.1f} M tokens (SGLang {on_their_host:.1f} M); "
            f"there the GPU has {ours:.2f} M ({theirs:.2f} M)"
        ) in text
    first, last = (
        100 * row["missed"]["no_snapshot"] / row["ideal_tokens"]
        for row, _ in (loads["open loop, 1x"], loads["386 clients, host cache"])
    )
    assert f"In the first row {first:.1f} % of the tokens had blocks and no snapshot, in the last {last:.1f} %." in text
    fills = [row["fill_seconds"] for pair in loads.values() for row in pair]
    assert f"the first prompts, which no cache has ({min(fills):.0f} to {max(fills):.0f} s)" in text
    longest = [row["first_token_ms"]["high"] / 1e3 for row in loads["93 clients, shortest-prefill-first"]]
    assert f"agents that lost theirs wait up to {longest[0]:.0f} s (SGLang {longest[1]:.0f})" in text


def test_figures_of_agents_behind_sglang() -> None:
    between = (row["between_tokens_ms"] for row in loads_of_agents()["154 clients, host cache"])
    ours, theirs = (f"{gap['p50']:.1f}/{gap['p95']:.1f} ms" for gap in between)
    assert f"| between tokens, 154 agents, host caches, p50/p95 | {ours} | {theirs} |" in LIMITS.read_text()


def test_figures_of_twice_the_snapshots() -> None:
    hits = {
        (row["live"], row["share"]): 100 * row["hit"] for row in rows_of("prefix_simulation_agents") if row["learns"]
    }
    twice = [f"{hits[live, 2 * SNAPSHOT_SHARE]:.1f}" for live in (0.5, 2)]
    default = [f"{hits[live, SNAPSHOT_SHARE]:.1f}" for live in (0.5, 2)]
    assert (
        f"hits {twice[0]} % instead of {default[0]} with memory for twice the live tokens, "
        f"but {twice[1]} instead of {default[1]} with memory for half"
    ) in unwrapped(LOAD)


def test_figures_of_a_lookup() -> None:
    rows = [row for row in rows_of("full_pool_turns") if (row["turns"], row["call"]) == (200, "lookup")]
    ours, theirs = (next(row["p50 ms"] for row in rows if row["subject"] == tree) for tree in ("ours", "sglang-rust"))
    line = f"| CPU time of a lookup, conversation of 200 turns | {ours:.1f} ms | {theirs:.1f} ms |"
    assert line in LIMITS.read_text()


def test_figures_of_index_selection_behind_sglang() -> None:
    us = {(row["case"], row["stage"], row["subject"]): row["us"] for row in rows_of("index")}
    text = unwrapped(LIMITS)

    def pair(case: str, stage: str) -> tuple[str, str]:
        ours, theirs = (us[f"{case}, top 512", stage, subject] for subject in ("ours", "in-tree"))
        return f"{ours:.0f}", f"{theirs:.0f}"

    for case, label in (("16 x 1024K", "of 1 M tokens"), ("16 x 1024K, shared", "that share 1 M tokens")):
        ours, theirs = pair(case, "all")
        assert f"| index selection, decode of 16 requests {label} | {ours} us | {theirs} us |" in text
    assert "Among the scores of 1 M tokens it takes {} us, SGLang's {}.".format(*pair("16 x 1024K", "select")) in text
    assert "Scores of shared tokens take {} and {}:".format(*pair("16 x 1024K, shared", "score")) in text


def test_figures_of_agents_with_hints() -> None:
    rows = {row["part"]: row for row in rows_of("agents_hints")}
    first = {part: row["first_token_s"] for part, row in rows.items()}
    kinds, text = ("none", "right", "wrong"), LOAD.read_text()
    for multiple, label in ((2, "2 times the GPU's"), (10, "10 times")):
        hits = " | ".join(f"{100 * rows[f'{multiple} x, {kind}']['hit_of_ideal']:.1f}" for kind in kinds)
        assert f"| {label}: hits, % | {hits} |" in text
    times = (first[f"10 x, {kind}"] for kind in kinds)
    assert (
        f"| 10 times: first token, p50/p90 | {' | '.join('{p50:.2f}/{p90:.1f} s'.format(**t) for t in times)} |" in text
    )
    none, right = (f"{rows[f'10 x, {kind}']['hit_of_ideal']:.0%}".replace("%", " %") for kind in ("none", "right"))
    assert (
        f"[hit {right} with right hints](../benchmarks/load.md#agents-that-give-hints), {none} without"
        in HINTS.read_text()
    )


def test_agents_of_the_readme() -> None:
    loads = loads_of_agents()
    few, many = (
        [f"{row['requests_per_s']:.1f}" for row in loads[load]] for load in ("open loop, 1x", "386 clients, host cache")
    )
    ours, _ = loads["386 clients, host cache"]
    times = ours["live_tokens"] / ours["server"]["max_total_num_tokens"]
    assert (
        f"[60 agents](docs/benchmarks/load.md) get {few[0]} answers/s, SGLang's {few[1]}; "
        f"386, {times:.0f} times what fits, {many[0]} and {many[1]} (equal host caches)."
    ) in unwrapped(README)


def test_nothing_reaches_the_cache_without_a_server() -> None:
    """Only the self-test of `doctor` names `standalone` in an import or a string, so no server loads it."""
    package = ROOT / "dsv4_sglang"
    sources = [file for file in package.rglob("*.py") if file.relative_to(package).parts[0] != "standalone"]
    named = re.compile(r"^\s*(from|import) dsv4_sglang\b.*\bstandalone\b|[\"']dsv4_sglang\.standalone", re.MULTILINE)
    naming = [str(file.relative_to(ROOT)) for file in sources if named.search(file.read_text())]
    assert naming == ["dsv4_sglang/testing/selftest.py"]


def test_make_test_serves_from_four_files() -> None:
    """All other files of tests/server have the mark `full`, so that `make test` takes five minutes."""
    files = (ROOT / "tests" / "server").glob("test_*.py")
    marks = {file.name: re.search(r"^pytestmark = (\[.*?\]|.*?)$", file.read_text(), re.M | re.S)[1] for file in files}
    assert all("mark.server" in mark for mark in marks.values())
    fast = {name for name, mark in marks.items() if "mark.full" not in mark}
    assert fast == {"test_server_exact.py", "test_server_fp8_prefix.py", "test_server_gpu.py", "test_server_tp.py"}


def test_packages_import_in_page_order() -> None:
    """A package imports only from packages above it in docs/design/architecture.md, which lists them all."""
    page = (ROOT / "docs" / "design" / "architecture.md").read_text()
    order = re.findall(r"^- `dsv4_sglang/(\w+)`:", page, re.MULTILINE)
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


def imports_from_below(order: list[str], package: str, source: str) -> list[str]:
    """Return the packages that a module of `package` imports, or names in a string, although `order` has them later."""
    later = order[order.index(package) + 1 :]
    found = set()
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
        found |= {match[1] for name in names if (match := PACKAGE_OF_SRT.match(name))}
    return sorted(found.intersection(later))


def test_srt_packages_import_in_page_order() -> None:
    """This applies to imports inside functions and for type checking, and to modules that are named in strings."""
    srt = ROOT / "dsv4_sglang" / "srt"
    page = (ROOT / "docs" / "design" / "architecture.md").read_text()
    order = re.findall(r"^- `srt/(\w+)`:", page, re.MULTILINE)
    assert sorted(order) == sorted(folder.name for folder in srt.iterdir() if list(folder.glob("*.py")))
    wrong = {
        str(file.relative_to(srt)): found
        for package in order
        for file in (srt / package).rglob("*.py")
        if (found := imports_from_below(order, package, file.read_text()))
    }
    assert wrong == {}
    for line in (
        "from dsv4_sglang.srt import b",
        "from dsv4_sglang.srt.b import f",
        "import dsv4_sglang.srt.b.c as c",
        "if TYPE_CHECKING:\n    from dsv4_sglang.srt.b.c import D",
        "def f():\n    from dsv4_sglang.srt.b import c",
        "MODULE = 'dsv4_sglang.srt.b.c'",
    ):
        assert imports_from_below(["a", "b"], "a", line) == ["b"] and not imports_from_below(["b", "a"], "a", line)


def test_only_tests_import_tests() -> None:
    """Imports go one way: from tests to benchmarks to the package."""
    tests = ROOT / "tests"
    names = {path.stem for path in tests.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    banned = {"benchmarks": names, "dsv4_sglang": names | {"benchmarks"}}
    imported = re.compile(r"^\s*(?:from|import) (\w+)", re.MULTILINE)
    assert {"reference", "support"} < names
    wrong = [
        f"{file.relative_to(ROOT)} imports {name}"
        for folder, forbidden in banned.items()
        for file in (ROOT / folder).rglob("*.py")
        for name in imported.findall(file.read_text())
        if name in forbidden
    ]
    assert not wrong
