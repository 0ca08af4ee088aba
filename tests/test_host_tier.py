"""The host tier on SGLang's own tree and controller, with streams that run late and in random order."""

from __future__ import annotations

import pytest
from prefix_tree_server import without_a_server
from streams import Stream
from tiered_server import TieredServer

from dsv4_sglang.srt.host.transfers import TransferController

POLICIES = ("write_through", "write_through_selective", "write_back")


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_server(monkeypatch)


def in_sglangs_order(monkeypatch: pytest.MonkeyPatch, server: TieredServer, method: str) -> None:
    """Its copies to the host ("start_writing") or from it ("start_loading") do not wait for the steps."""
    original, nothing = getattr(TransferController, method), Stream(server.streams)

    def without_the_wait(self: TransferController) -> object:
        self.forward_stream = nothing
        try:
            return original(self)
        finally:
            self.forward_stream = server.forward

    monkeypatch.setattr(TransferController, method, without_the_wait)


@pytest.mark.parametrize("policy", POLICIES)
def test_steps_read_what_they_should(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    server = TieredServer(monkeypatch, seed=1, policy=policy)
    for turn in range(200):
        server.turn()
        assert not server.wrong, (turn, server.wrong)
        if turn % 4 == 0:
            server.check()
    server.settle()
    server.check()
    server.check_contents()
    assert server.from_host > 0, "nothing came from the host"


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_twenty_seeds_of_late_copies(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """Small hosts and large ones; nothing is read before it is there, leaked, or owned twice."""
    for seed in range(20):
        with monkeypatch.context() as patch:
            sizes = {"host_blocks": 20 + 15 * (seed % 8), "host_checkpoints": 4 + 7 * (seed % 8)}
            server = TieredServer(patch, seed, policy=policy, **sizes)
            for turn in range(300):
                server.turn()
                assert not server.wrong, (seed, turn, server.wrong)
                if turn % 10 == 0:
                    server.check()
            server.settle()
            server.check()
            server.check_contents()
            if seed % 2:
                assert server.flush()
                server.check()


@pytest.mark.parametrize("method", ["start_writing", "start_loading"])
def test_copies_in_sglangs_order_bring_wrong_bytes(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Without either wait a step reads something else within few seeds: what docs/host_tier.md says of the order."""
    for seed in range(20):
        with monkeypatch.context() as patch:
            server = TieredServer(patch, seed)
            in_sglangs_order(patch, server, method)
            for _ in range(400):
                server.turn()
                if server.wrong:
                    return
    pytest.fail("the order of copies makes no difference here: the test does not test")
