"""What the prefix cache did, in the log and, with --enable-metrics, under /metrics."""

from __future__ import annotations

import logging
import time
from typing import Any

log = logging.getLogger(__name__)

LOG_SECONDS = 60.0
DESCRIPTIONS = {
    "hit_tokens": "prompt tokens served from the cache",
    "lost_tokens": "prompt tokens whose blocks were cached, computed again for want of a checkpoint",
    "taken": "checkpoints taken",
    "evicted": "checkpoints evicted",
    "refused": "checkpoints not taken because no slot was free or worth evicting",
    "held": "checkpoint slots in use",
}


class PrefixCounters:
    """Plain numbers; `publish` copies them to Prometheus and, now and then, to the log."""

    def __init__(self, size: int, metrics: bool) -> None:
        self.size = size
        self.hit_tokens = self.lost_tokens = self.taken = self.evicted = self.refused = self.held = 0
        self._logged_at, self._logged = time.monotonic(), (0, 0)
        self._published: dict[str, int] = dict.fromkeys(DESCRIPTIONS, 0)
        self._prometheus: dict[str, Any] = {}
        if metrics:
            # SGLang sets PROMETHEUS_MULTIPROC_DIR first; the library reads it when it is imported.
            from prometheus_client import Counter, Gauge

            for name, text in DESCRIPTIONS.items():
                if name == "held":
                    self._prometheus[name] = Gauge(f"dsv4:checkpoints_{name}", text, multiprocess_mode="mostrecent")
                else:
                    what = name if name.endswith("tokens") else f"checkpoints_{name}"
                    self._prometheus[name] = Counter(f"dsv4:prefix_{what}", text)

    def resumed(self, resumed: int, cached: int) -> None:
        """A request begins at `resumed` tokens; its path has blocks up to `cached`."""
        self.hit_tokens += resumed
        self.lost_tokens += max(0, cached - resumed)
        self.publish()

    def publish(self) -> None:
        for name, metric in self._prometheus.items():
            value = getattr(self, name)
            if name == "held":
                metric.set(value)
            else:
                metric.inc(value - self._published[name])
            self._published[name] = value
        now = time.monotonic()
        if now - self._logged_at >= LOG_SECONDS and (self.hit_tokens, self.taken) != self._logged:
            self._logged_at, self._logged = now, (self.hit_tokens, self.taken)
            log.info(str(self))

    def __str__(self) -> str:
        return (
            f"prefix cache: {self.hit_tokens} tokens hit, {self.lost_tokens} lost for want of a checkpoint; "
            f"checkpoints {self.held} of {self.size} held, {self.taken} taken, {self.evicted} evicted, "
            f"{self.refused} not taken"
        )
