"""Hints of requests on SGLang's tree, without a server: what they change in evictions, and how they end."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from support.prefix_tree import BLOCK, Request, TreeServer, hints, without_a_server

from benchmarks.prefix_simulation import simulate_agents
from benchmarks.simulated_agents import KINDS
from benchmarks.tool_pauses import NO_HINTS, RIGHT
from dsv4_sglang.srt.features.integrity.audit import audit
from dsv4_sglang.srt.prefix_cache.hint_weights import DEMOTED, LEAST_JUDGED, MOST_WAITS, ExpectedWaits, Hint, HintTrust
from dsv4_sglang.srt.prefix_cache.hints import hints_of
from dsv4_sglang.srt.prefix_cache.registry import REMEMBERED, SnapshotRegistry
from dsv4_sglang.srt.prefix_cache.reuse import REUSE_MEMORY
from dsv4_sglang.srt.prefix_cache.tenants import DEVICE, TenantShares


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> TreeServer:
    """A server for six conversations of eight blocks, of which pins may hold two. All hints are trusted."""
    without_a_server(monkeypatch)
    monkeypatch.setattr(HintTrust, "trusts", lambda trust, hint: True)
    server = TreeServer(blocks=50, snapshots=24, interval=30, chunk=30)
    server.cache.pins.most_tokens, server.cache.pins.most_pins = 16 * BLOCK, 4
    return server


def serve(server: TreeServer, name: int, **actions: dict[str, Any]) -> int:
    """Serve the conversation of this name, with hints. Return its cached tokens."""
    request = begun(server, name, **actions)
    cached = len(request.prefix_indices)
    server.finish(request)
    server.check()
    return cached


def begun(server: TreeServer, name: int, **actions: dict[str, Any]) -> Request:
    request = server.admit([10 * name + i for i in range(8)])
    assert request is not None
    request.kv_hints = hints(**actions)
    return request


def kept(server: TreeServer, *names: int) -> list[int]:
    """Return the conversations of these names that a request would hit, without a trace in the statistics."""
    found = []
    for name in names:
        request = Request([10 * name + i for i in range(8)], 1, 0)
        server._match(request)
        found += [name] if len(request.prefix_indices) else []
    return found


def test_a_pin_survives_a_flood(server: TreeServer) -> None:
    serve(server, 0, pin={"name": "agent", "seconds": 60})
    for name in range(1, 20):
        serve(server, name)
    server.press(server.blocks, server.snapshots)
    server.check()
    assert kept(server, *range(20)) == [0]
    assert dict(server.cache.pins)["", "agent"].tokens == 8 * BLOCK


@pytest.mark.parametrize("end", ["time", "release", "demote"])
def test_a_pin_that_ends_is_evicted_again(server: TreeServer, end: str) -> None:
    serve(server, 0, pin={"name": "agent", "seconds": 60})
    server.cache.at_time(59)
    assert len(list(server.cache.pins)) == 1
    if end == "time":
        server.cache.at_time(60)
    elif end == "release":
        serve(server, 0, pin={"name": "agent", "seconds": 0})
    else:
        serve(server, 0, pin={"name": "agent", "seconds": 0}, demote={})
    assert not list(server.cache.pins)
    server.press(server.blocks, server.snapshots)
    server.check()
    assert kept(server, 0) == []


def test_a_pin_moves_with_its_conversation(server: TreeServer) -> None:
    pin = {"name": "agent", "seconds": 60}
    serve(server, 0, pin=pin)
    request = server.admit([*range(8), 70, 71, 72])
    assert request is not None and len(request.prefix_indices) == 8 * BLOCK
    request.kv_hints = hints(pin=pin)
    server.finish(request)
    server.check()
    assert [(key, of.tokens) for key, of in server.cache.pins] == [(("", "agent"), 11 * BLOCK)]


def test_pins_of_tenants_are_apart(server: TreeServer) -> None:
    for salt in ("a", "b"):
        request = begun(server, 1 if salt == "a" else 2, pin={"name": "agent", "seconds": 60})
        request.cache_salt = salt
        server.finish(request)
    assert [key for key, _ in server.cache.pins] == [("a", "agent"), ("b", "agent")]


def test_the_limit_of_pins_counts_requests_that_run(server: TreeServer) -> None:
    pins = server.cache.pins
    serve(server, 0, pin={"name": "a", "seconds": 60})
    pins.check(("", "b"), 8 * BLOCK, [])
    with pytest.raises(ValueError, match=r"'b' asks for 1152 tokens.* may hold 2048 tokens.* of which 1024 are used"):
        pins.check(("", "b"), 9 * BLOCK, [])
    with pytest.raises(ValueError, match="of which 2048 are used"):
        pins.check(("", "b"), BLOCK, [(("", "c"), 8 * BLOCK)])
    pins.check(("", "a"), 16 * BLOCK, [])  # it is replaced
    with pytest.raises(ValueError, match="of which 1536 are used"):
        pins.check(("", "b"), 5 * BLOCK, [(("", "a"), 12 * BLOCK)])  # the longer one of both
    pins.most_pins = 1
    with pytest.raises(ValueError, match=r"may hold 1 slots .* of which 1 are used"):
        pins.check(("", "b"), BLOCK, [])
    assert [key for key, _ in pins] == [("", "a")]


def test_a_flush_drops_pins(server: TreeServer) -> None:
    serve(server, 0, pin={"name": "agent", "seconds": 60}, retain={"seconds": 60})
    server.flush()
    assert not list(server.cache.pins)
    server.check()
    server.cache.at_time(61)
    assert serve(server, 0) == 0
    server.check()


def test_an_aborted_request_has_no_hints(server: TreeServer) -> None:
    serve(server, 0, pin={"name": "agent", "seconds": 60})
    request = begun(server, 0, pin={"name": "agent", "seconds": 0}, demote={})
    request.finished_reason = FINISH_ABORT()
    server.finish(request)
    server.check()
    assert [key for key, _ in server.cache.pins] == [("", "agent")]
    assert server.component.metrics.total("hints") == 1


def test_retained_conversations_stay_longest_and_demoted_ones_go_first(server: TreeServer) -> None:
    """Hints change the eviction order. Without them the newest conversation is evicted first, as none has returned."""
    for name in range(6):
        serve(server, name, **({"demote": {}} if name == 2 else {"retain": {"seconds": 60}} if name == 4 else {}))
    for blocks, left in ((0, [0, 1, 2, 3, 4, 5]), (10, [0, 1, 3, 4, 5]), (18, [0, 1, 3, 4]), (42, [4]), (50, [])):
        server.press(blocks, 0)
        server.check()
        assert kept(server, *range(6)) == left


def test_the_time_of_a_retained_conversation_ends(server: TreeServer) -> None:
    serve(server, 0, retain={"seconds": 10, "weight": 4})
    registry = server.component.slots.registry
    number = next(iter(server.component.slots.nodes))
    server.cache.at_time(9)
    assert registry.hints.weight[number] == 4
    server.cache.at_time(10)
    assert registry.hints.weight[number] == 1
    server.check()


def test_a_hint_ends_when_its_conversation_continues(server: TreeServer) -> None:
    serve(server, 0, demote={})
    registry = server.component.slots.registry
    assert registry.hints.weight.min() == DEMOTED
    assert serve(server, 0) > 0
    assert (registry.hints.weight == 1).all()


def test_a_snapshot_that_conversations_share_has_no_hint(server: TreeServer) -> None:
    """The prompt of the second request ends where the first one continues, as after a common system prompt."""
    serve(server, 0)
    request = server.admit(list(range(4)))
    assert request is not None
    request.kv_hints = hints(demote={})
    server.finish(request)
    server.check()
    registry, metrics = server.component.slots.registry, server.component.metrics
    assert (registry.hints.weight == 1).all() and metrics.total("hints", "demote") == 0
    assert metrics.total("hints", "lost") == 1


# Expected waits


def returns(waits: ExpectedWaits, *pairs: tuple[float, float], tenant: str = "") -> ExpectedWaits:
    """Count returns, each with the seconds of its hint and its wait."""
    for seconds, wait in pairs:
        waits.returned(Hint(2.0, tenant, seconds), wait)
    return waits


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([(10, 40), (30, 120), (20, 80)], {10: 40, 100: 400}),  # proportional
        ([(240, 40), (240, 120)], {240: 80, 10: 80}),  # the same seconds after each turn
        ([(10, 120), (30, 40)], {10: 80, 30: 80}),  # the opposite: the mean
        ([(10, 50), (30, 70)], {10: 50, 30: 70, 50: 90}),  # a part of the wait does not depend on them
        ([(10, 0.5), (30, 40)], {1: 20.25 / 20, 20: 20.25}),  # no wait below 0
    ],
)
def test_waits_follow_seconds_as_far_as_they_did(
    pairs: list[tuple[float, float]], expected: dict[float, float]
) -> None:
    waits = returns(ExpectedWaits(), *pairs)
    assert {seconds: waits.of(Hint(2.0, "", seconds)) for seconds in expected} == pytest.approx(expected)


def test_waits_are_those_of_the_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4_sglang.srt.prefix_cache.hint_weights.MOST_TENANTS", 3)
    waits = ExpectedWaits()
    for tenant in range(5):
        returns(waits, (10, 10 * tenant), tenant=str(tenant))
    assert [waits.of(Hint(2.0, str(tenant), 20)) for tenant in range(6)] == [0, 0, 20, 30, 40, 0]
    assert waits.of(Hint(DEMOTED, "4")) == 0


def test_a_conversation_that_returns_later_is_evicted_first() -> None:
    """More seconds mean an earlier eviction. A late return is evicted before conversations without a hint."""
    registry = SnapshotRegistry(4)
    registry.hints.trust.trusts = lambda hint: True  # type: ignore[method-assign]
    registry.reuse.mean_interval = 50.0
    returns(registry.hints.waits, (10, 10), (100, 100))
    for slot, seconds in ((1, 20), (2, 500), (3, 0), (4, 40)):
        registry.add(slot, BLOCK, 0)
        registry.policy.at_leaf(slot, True)
        if seconds:
            registry.hint(slot, Hint(2.0, "", seconds), until=seconds)
    victims = []
    while victim := registry.policy.next_leaf():
        assert victim == registry.policy.lowest_value(needed=True, saves=0)
        victims.append(victim)
        registry.remove(victim)
    assert victims == [2, 3, 4, 1]


def test_the_expected_wait_ends_with_the_hint() -> None:
    registry = SnapshotRegistry(4, host_rows=1)
    registry.hints.trust.trusts = lambda hint: True  # type: ignore[method-assign]
    returns(registry.hints.waits, (10, 30))
    registry.add(1, BLOCK, 0)
    registry.hint(1, Hint(2.0, "", 10), until=10)
    registry.move(1, to := registry.host_id(0))
    assert (registry.hints.expected[1], registry.hints.expected[to]) == (0, 30)
    registry.end_hints(10)
    assert registry.hints.expected[to] == 0


# Trust


def test_hints_have_no_effect_until_they_came_true() -> None:
    registry = SnapshotRegistry(4)
    registry.add(1, BLOCK, 0)
    hint, applied = Hint(8.0, "tenant"), []
    for _ in range(LEAST_JUDGED + 2):
        applied.append(registry.hint(1, hint))
        registry.use(1)
    assert applied == [False] * LEAST_JUDGED + [True] * 2
    assert not registry.hint(1, Hint(8.0, "other")), "each tenant has to prove itself"
    assert not registry.hint(1, Hint(DEMOTED, "tenant")), "and each kind of hint"
    for second in range(LEAST_JUDGED):
        registry.hint(1, hint, until=second)
        registry.end_hints(second)
    assert not registry.hint(1, hint), "conversations that do not return in time"


def test_evicted_conversations_are_judged_when_they_return_or_stay_away() -> None:
    registry = SnapshotRegistry(4)
    registry.reuse.mean_reuse_wait, registry.reuse.returns = 10.0, REUSE_MEMORY
    judged: list[tuple[float, bool]] = []
    registry.hints.trust.judge = lambda hint, returned: judged.append((hint.weight, returned))  # type: ignore
    for slot, weight in ((1, 8.0), (2, 8.0), (3, DEMOTED), (4, DEMOTED)):
        registry.add(slot, BLOCK, 0)
        registry.hint(slot, Hint(weight, ""))
        registry.remove(slot, path_hash=slot)
    assert not judged
    registry.ghost_hit([9, 1])
    registry.ghost_hit([3])
    assert judged == [(8.0, True), (DEMOTED, True)]
    for _ in range(30):
        registry.tick()
    registry.ghost_hit([])
    assert judged[2:] == [(8.0, False), (DEMOTED, False)]
    registry.ghost_hit([2, 4])
    assert len(judged) == 4


def test_a_long_absence_is_judged_by_the_wait_that_is_expected() -> None:
    """After several mean waits the conversation may still return. Before the mean is known, nothing is judged."""
    registry = SnapshotRegistry(4)
    judged: list[bool] = []
    registry.hints.trust.judge = lambda hint, returned: judged.append(returned)  # type: ignore
    for slot in (1, 2):
        registry.add(slot, BLOCK, 0)
        registry.hint(slot, Hint(2.0, "", 100 * slot), until=100 * slot)
        registry.remove(slot, path_hash=slot)
    returns(registry.hints.waits, (100, 50), (200, 100))
    for now, returned, expected in ((MOST_WAITS * 60, 0, []), (MOST_WAITS * 60, REUSE_MEMORY, [False])):
        registry.now, registry.reuse.mean_reuse_wait, registry.reuse.returns = now, 10.0, returned
        registry.ghost_hit([])
        assert judged == expected
    registry.now = MOST_WAITS * 100
    registry.ghost_hit([])
    assert judged == [False, False]


def test_the_use_of_a_shared_snapshot_is_no_return() -> None:
    registry = SnapshotRegistry(4)
    registry.add(1, BLOCK, 0)
    registry.hint(1, Hint(2.0, "", 10), until=10)
    registry.add(2, 2 * BLOCK, 1)
    registry.use(1)
    assert not registry.hints.trust._shares and not registry.hints.waits.of(Hint(2.0, "", 10))


def test_a_hint_moves_with_the_new_number_of_its_snapshot() -> None:
    """The device evicts a snapshot that the host has, and its hint still ends in time."""
    registry = SnapshotRegistry(4, host_rows=2)
    registry.hints.trust.trusts = lambda hint: True  # type: ignore[method-assign]
    registry.add(1, BLOCK, 0)
    registry.hint(1, Hint(8.0, ""), until=10)
    registry.move(1, to := registry.host_id(0))
    assert (registry.hints.weight[1], registry.hints.weight[to]) == (1, 8)
    registry.end_hints(10)
    assert registry.hints.weight[to] == 1


def test_trust_is_kept_for_a_bounded_number_of_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4_sglang.srt.prefix_cache.hint_weights.MOST_TENANTS", 3)
    trust = HintTrust()
    for tenant in range(9):
        for _ in range(LEAST_JUDGED):
            trust.judge(Hint(8.0, str(tenant)), returned=True)
    assert [tenant for tenant in range(9) if trust.trusts(Hint(8.0, str(tenant)))] == list(range(3, 9))


def test_what_waits_for_its_judgement_is_bounded() -> None:
    registry = SnapshotRegistry(4)
    for path_hash in range(1, 100):
        registry.add(1, BLOCK, 0)
        registry.hint(1, Hint(8.0, ""))
        registry.remove(1, path_hash)
    assert len(registry.hints._evicted) == len(registry.hints._evicted_ends) == REMEMBERED * registry.size


@pytest.mark.full
@pytest.mark.parametrize(("multiple", "gain"), [(2, 0.015), (10, 0.07)])
def test_right_hints_gain_hits_and_no_others_cost_many(multiple: int, gain: float) -> None:
    """Hints that say nothing scatter by 2 to 5 % of the hits in one run, so the bound of their cost is on the mean."""
    runs = [{kind: simulate_agents(multiple, kind, 120.0, seed)["hit"] for kind in KINDS} for seed in range(3)]
    assert all(hits[RIGHT] >= hits[NO_HINTS] + gain for hits in runs)
    mean = {kind: fmean(hits[kind] for hits in runs) for kind in KINDS}
    assert min(mean.values()) >= 0.98 * mean[NO_HINTS]


# Validation


def test_actions_of_others_are_ignored() -> None:
    envelope = hints(move={"to": 3}, retain={"seconds": 5})
    assert hints_of(envelope).retain is not None and hints_of(None) == hints_of(hints(move={}))


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ({"retain": {}}, "missing required field `seconds`"),
        ({"retain": {"seconds": 0}}, "Expected `int` >= 1"),
        ({"retain": {"seconds": 1.5}}, "Expected `int`"),
        ({"retain": {"seconds": 86_401}}, "Expected `int` <= 86400"),
        ({"retain": {"seconds": 5, "weight": 3}}, "Invalid enum value 3"),
        ({"pin": {"seconds": 5}}, "missing required field `name`"),
        ({"pin": {"name": "", "seconds": 5}}, "Expected `str` of length >= 1"),
        ({"pin": {"name": "x" * 129, "seconds": 5}}, "Expected `str` of length <= 128"),
        ({"pin": {"name": "x", "seconds": -1}}, "Expected `int` >= 0"),
        ({"demote": {"seconds": 5}}, "unknown field `seconds`"),
        ({"retain": {"seconds": 5}, "demote": {}}, "expected one pin, and one of retain and demote"),
    ],
)
def test_a_wrong_payload_gets_one_line(actions: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"^kv_hints: action ") as error:
        hints_of(hints(**actions))
    assert message in str(error.value) and "\n" not in str(error.value)


# Shares of tenants


def test_a_tenant_above_its_share_evicts_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tenant "b" serves more and more conversations; those of "a", within its share, stay."""
    without_a_server(monkeypatch)
    server = TreeServer(blocks=50, snapshots=24, interval=30, chunk=30, tenant_percent=40)

    def visit(salt: str, name: int) -> bool:
        request = server.admit([10 * name + i for i in range(8)], salt=salt)
        assert request is not None
        hit = len(request.prefix_indices) > 0
        server.finish(request)
        server.check()
        return hit

    for name in range(2, 20):
        visit("b", name)
    # These are the youngest, and would be evicted first.
    visit("a", 0)
    visit("a", 1)
    for name in range(20, 30):
        visit("b", name)
    assert visit("a", 0) and visit("a", 1)
    metrics = server.component.metrics
    assert metrics.states()["tenants"] == 2 and metrics.states()["tenants_above_share"] == 1
    tokens = metrics.tenant_tokens()
    assert (tokens["1"], tokens["2"], tokens["3"], tokens["other"]) == (32 * BLOCK, 16 * BLOCK, 0, 0)


def test_the_audit_reports_tenants_that_are_counted_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_server(monkeypatch)
    server = TreeServer(blocks=50, snapshots=24, tenant_percent=40)
    serve(server, 0)
    registry = server.component.slots.registry
    registry.tenants.count(DEVICE, next(iter(server.component.slots.nodes)), BLOCK, 0)
    assert "tenants on the device: counted as" in str(audit(server.cache, []))


def test_without_the_option_tenants_are_not_counted(server: TreeServer) -> None:
    serve(server, 0)
    tenants = server.component.slots.registry.tenants
    assert not isinstance(tenants, TenantShares) and not server.component.metrics.tenant_tokens()


def test_pins_of_one_tenant_are_limited_to_its_share(server: TreeServer) -> None:
    pins = server.cache.pins
    pins.tenant_percent = 50
    pins.check(("a", "x"), 8 * BLOCK, [])
    with pytest.raises(ValueError, match=r"one tenant may hold 1024 tokens .* of which 512 are used"):
        pins.check(("a", "x"), 5 * BLOCK, [(("a", "y"), 4 * BLOCK)])
    pins.check(("b", "x"), 8 * BLOCK, [(("a", "y"), 8 * BLOCK)])
