"""Answer of a flush on several ranks. tests/server/test_server_hints.py flushes real servers."""

from __future__ import annotations

from sglang.srt.managers.io_struct import FlushCacheReqOutput, RpcReqOutput

from dsv4_sglang.srt.features.flush import failures_first


def test_a_flush_fails_if_a_rank_fails() -> None:
    """SGLang reads the first answer only."""
    flushed, failed = (FlushCacheReqOutput(success=success) for success in (True, False))
    assert failures_first([flushed, failed, flushed])[0] is failed
    others = [flushed, RpcReqOutput(success=False, message="")]
    assert failures_first(others) == others
