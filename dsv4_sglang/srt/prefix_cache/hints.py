"""Hints of a request on its conversation (`kv_hints`): what they ask for, and their effect when the request ends.

SGLang carries an envelope of actions with a request and reads none of them. This package reads the actions `retain`,
`pin` and `demote` of version "1". Other actions and versions are ignored, as SGLang's envelope prescribes.
docs/guides/hints.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from dsv4_sglang.srt.prefix_cache.component import component_of
from dsv4_sglang.srt.prefix_cache.hint_weights import DEMOTED, Hint
from dsv4_sglang.srt.prefix_cache.metrics import DEMOTE, LOST, PIN, RETAIN, UNTRUSTED

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from dsv4_sglang.srt.prefix_cache.cache import PrefixCache

VERSION = "1"
MOST_SECONDS = 86_400
Seconds = Annotated[int, msgspec.Meta(ge=1, le=MOST_SECONDS)]


class Retain(msgspec.Struct, forbid_unknown_fields=True):
    """Payload of `retain`: the conversation returns within some seconds. Until then its value is multiplied by
    `weight`, and its wait is expected from `seconds` (`ExpectedWaits`).

    The number of different weights is small, because an eviction compares the oldest snapshots of each.
    """

    seconds: Seconds
    weight: Literal[2, 4, 8] = 2


class Pin(msgspec.Struct, forbid_unknown_fields=True):
    """Payload of `pin`: keep the conversation on the device for some seconds. It replaces the tenant's pin of the same
    name. 0 seconds release it."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    seconds: Annotated[int, msgspec.Meta(ge=0, le=MOST_SECONDS)]


class Demote(msgspec.Struct, forbid_unknown_fields=True):
    """Payload of `demote`: evict the conversation first."""


PAYLOADS = {RETAIN: Retain, PIN: Pin, DEMOTE: Demote}


@dataclass(frozen=True)
class RequestHints:
    """The hints of one request, at most one of each action."""

    retain: Retain | None = None
    pin: Pin | None = None
    demote: Demote | None = None


NONE = RequestHints()


def hints_of(envelope: Any) -> RequestHints:
    """Return the hints in SGLang's `KvHintsEnvelope`, or in None.

    Raises:
        ValueError: a payload is invalid, or two actions exclude each other.
    """
    found: dict[str, Any] = {}
    for action in () if envelope is None else envelope.actions:
        kind = action.action_type
        if kind not in PAYLOADS or action.action_version != VERSION:
            continue
        where = f"kv_hints: action {action.action_id!r} ({kind})"
        if kind in found or (kind in (RETAIN, DEMOTE) and found.keys() & {RETAIN, DEMOTE}):
            raise ValueError(f"{where} follows {', '.join(found)}; expected one pin, and one of retain and demote")
        try:
            found[kind] = msgspec.convert(action.payload, PAYLOADS[kind])
        except msgspec.ValidationError as error:
            raise ValueError(f"{where} has the payload {action.payload!r}: {error}") from None
    return RequestHints(**found)


def apply_hints(cache: PrefixCache, req: Req, node: Any) -> None:
    """Apply the hints of a request that ends. One that is aborted has none.

    Args:
        cache: prefix cache.
        req: the request.
        node: tree node of its last snapshot, or the root without one.
    """
    hints = NONE if isinstance(req.finished_reason, FINISH_ABORT) else hints_of(req.kv_hints)
    if hints == NONE:
        return
    component, tenant = component_of(cache), req.cache_salt or ""
    number = component.slots.id_of(node)
    outcomes = []
    if hints.pin is not None:
        cache.pins.release(key := (tenant, hints.pin.name))
        if hints.pin.seconds:
            pinned = number and cache.pins.pin(key, node, cache.now + hints.pin.seconds)
            outcomes.append(PIN if pinned else LOST)
    if hints.retain is not None or hints.demote is not None:
        hint, until, kind = Hint(DEMOTED, tenant), None, DEMOTE
        if (retain := hints.retain) is not None:
            hint = Hint(float(retain.weight), tenant, float(retain.seconds))
            until, kind = cache.now + retain.seconds, RETAIN
        if not number or not (registry := component.slots.registry).ends_branch(number):
            outcomes.append(LOST)
        else:
            outcomes.append(kind if registry.hint(number, hint, until) else UNTRUSTED)
    for outcome in outcomes:
        component.metrics.add("hints", value=outcome)
