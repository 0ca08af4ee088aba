"""Draw the panels of Grafana's dashboard with matplotlib, from the same queries: docs/guides/dashboard.png.

python tools/draw_dashboard.py http://127.0.0.1:9090 --minutes 5 --out docs/guides/dashboard.png
"""

from __future__ import annotations

import argparse
import json
import re
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).parent.parent / "docker" / "grafana" / "dashboards" / "cache.json"
COLUMNS = 3
AXIS = {"percentunit": "share", "s": "seconds", "Bps": "bytes/s", "short": ""}


def panels() -> list[dict[str, Any]]:
    """The panels of the dashboard, as Grafana has them."""
    return json.loads(DASHBOARD.read_text())["panels"]


def query(expression: str, window: str) -> str:
    """Fill in what Grafana fills in. `window`: of rates, such as "2m"."""
    return expression.replace("$__rate_interval", window).replace("$instance", ".*")


def ask(url: str, path: str, **parameters: Any) -> Any:
    """The data of one request to Prometheus' HTTP API. Raises HTTPError for a query that is not valid."""
    address = f"{url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(address, timeout=30) as response:
        return json.load(response)["data"]


def legend(template: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), template)


def draw(url: str, out: Path, seconds: float, window: str) -> None:
    """Draw the last `seconds` of a Prometheus server."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    end, found = time.time(), panels()
    rows = -(-len(found) // COLUMNS)
    figure, axes = pyplot.subplots(rows, COLUMNS, figsize=(15, 2.7 * rows), layout="constrained")
    for panel, axis in zip(found, axes.flat):
        for target in panel["targets"]:
            span = {"start": end - seconds, "end": end, "step": max(1.0, seconds / 100)}
            for series in ask(url, "query_range", query=query(target["expr"], window), **span)["result"]:
                times, values = zip(*((at - end + seconds, float(value)) for at, value in series["values"]))
                axis.plot(times, values, label=legend(target["legendFormat"], series["metric"]))
        axis.set_title(panel["title"], fontsize=10)
        axis.set_ylabel(AXIS[panel["fieldConfig"]["defaults"]["unit"]], fontsize=8)
        axis.set_ylim(bottom=0)
        axis.set_xlim(0, seconds)
        axis.tick_params(labelsize=8)
        if axis.lines:
            axis.legend(fontsize=7)
    figure.supxlabel("seconds", fontsize=9)
    figure.savefig(out, dpi=70)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", help="of Prometheus")
    parser.add_argument("--out", type=Path, default=Path("docs/guides/dashboard.png"))
    parser.add_argument("--minutes", type=float, default=5)
    options = parser.parse_args()
    draw(options.url, options.out, 60 * options.minutes, "1m")


if __name__ == "__main__":
    main()
