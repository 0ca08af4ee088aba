"""Hook of mkdocs, which reads Markdown in another way than GitHub does.

- A list or table after a paragraph needs an empty line before it, a nested list an indentation of 4.
- The site contains docs/ only. Links to other files lead to the repository at `repo_url`, and become their text if that
  is not set. tests/repository/test_docs.py checks that these files exist.
"""

import os
import re
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((\.\./[^)\s]*)\)")
NESTED = re.compile(r"^ {2,3}(?=[-*] )", re.MULTILINE)
ITEM = re.compile(r"(?:[-*]|\d+\.) ")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    folder = os.path.dirname(page.file.src_uri)

    def in_repository(link: re.Match[str]) -> str:
        path = os.path.normpath(os.path.join("docs", folder, link[2]))
        if path.startswith("docs/"):
            return link[0]
        return f"[{link[1]}]({config.repo_url}/blob/HEAD/{path})" if config.repo_url else link[1]

    return LINK.sub(in_repository, NESTED.sub("    ", with_empty_lines(markdown)))


def with_empty_lines(markdown: str) -> str:
    """Insert an empty line between a paragraph and the list or table that follows it."""
    lines: list[str] = []
    for line in markdown.split("\n"):
        before = lines[-1] if lines else ""
        paragraph = bool(before.strip()) and not before.startswith((" ", "#", "|", "```")) and not ITEM.match(before)
        if paragraph and re.match(r"[-*] |1\. |\|", line):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)
