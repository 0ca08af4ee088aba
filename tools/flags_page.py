"""Write docs/reference/flags.md from the table of SGLang's flags.

python tools/flags_page.py            # write the page
python tools/flags_page.py --check    # exit code 1 if the page differs from the table
"""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import TextWrapper

from dsv4_sglang.srt.plugin.flag_table import DENIED, LIMITS
from dsv4_sglang.srt.plugin.flag_validation import flag

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "flags.md"
WRAPPER = TextWrapper(120, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
HEAD = """# SGLang's flags

Flags keep their meaning, except for those below. A rejected flag ends the start with the reason. Rejected
combinations are listed under "Limits" in the guides.

`tools/flags_page.py` writes this page.

- DeepSeek-V4.1: no speculation, no disaggregation.
- `--cuda-graph-backend-prefill` is `breakable` or `disabled`, `--cuda-graph-backend-decode` is `full` or `disabled`.
"""
LIMITED = """
## Limited

"""
REJECTED = """
## Rejected

These flags may only have their default.

"""


def bullets(flags_by_reason: dict[str, list[str]]) -> str:
    """Return one bullet for each reason, with its flags."""
    items = (f"{', '.join(f'`{name}`' for name in names)}: {reason}." for reason, names in flags_by_reason.items())
    return "".join(WRAPPER.fill(item) + "\n" for item in items)


def page() -> str:
    """Return the text of the page."""
    limited: dict[str, list[str]] = {}
    for limit in LIMITS:
        limited.setdefault(limit.reason, []).append(flag(limit.field))
    rejected: dict[str, list[str]] = {}
    for denied in DENIED:
        rejected.setdefault(denied.reason, []).extend(map(flag, denied.fields))
    return HEAD + LIMITED + bullets(limited) + REJECTED + bullets(rejected)


def main() -> int:
    """Write the page, or compare it with the table."""
    if sys.argv[1:] == ["--check"]:
        if PAGE.read_text() == page():
            return 0
        print(f"{PAGE} differs from the flag table: run python tools/flags_page.py", file=sys.stderr)
        return 1
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
