"""Reports of the audit in /server_info, with the option `integrity_check` (`add_reports`, a hook of the table in
`hooks`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from dsv4_sglang.srt.features.integrity.audit import audit
from dsv4_sglang.srt.features.integrity.owners import Finding
from dsv4_sglang.srt.sglang.scheduler import disaggregated_requests, idle_differences

# Key of the reports in the internal state of a DP-attention rank, as GET /server_info returns it.
KEY = "dsv4_sglang_integrity"
# A process waits this many times the duration of an audit before the next one, so audits take a tenth of its time.
REST = 9
# Attribute of a scheduler: its last report, and when that audit ended.
LAST_REPORT = "dsv4_last_report"
# Limit of the findings in a report, so that a growing leak does not make the answer grow.
MAX_FINDINGS = 200


def add_reports(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """AROUND `Scheduler.get_internal_state`: add the reports of all ranks of an attention group to its answer.

    Every process runs this call, and the first of each DP-attention rank answers. Any client may send the request at
    any rate, so a process repeats its last report, with its age, until it has worked REST times as long as the audit
    took.
    """
    output = original(scheduler, recv_req)
    group, own = scheduler.attn_tp_cpu_group, _recent_report(scheduler)
    reports: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(reports, own, group=group)
    output.internal_state[KEY] = reports
    return output


def _recent_report(scheduler: Any) -> dict[str, Any]:
    """Return a new report, or the last one if it is too early for an audit. `age_seconds`: the time since the audit
    began."""
    last, ended = vars(scheduler).get(LAST_REPORT, (None, 0.0))
    if last is None or time.perf_counter() - ended >= REST * last["seconds"]:
        last = report(scheduler)
        ended = time.perf_counter()
        setattr(scheduler, LAST_REPORT, (last, ended))
    return {**last, "age_seconds": time.perf_counter() - ended + last["seconds"]}


def report(scheduler: Any) -> dict[str, Any]:
    """Return the result of the check of a scheduler's cache as a JSON object. If the scheduler is idle, it includes the
    result of SGLang's own checks of an idle server."""
    from sglang.srt.platforms import current_platform
    from sglang.srt.runtime_context import get_parallel

    begin = time.perf_counter()
    current_platform.synchronize()  # several streams write the tables of requests
    requests = requests_of(scheduler)
    found = audit(scheduler.tree_cache, requests)
    findings, idle = found.findings, scheduler.is_fully_idle()
    if idle:
        findings += [Finding("SGLang's check of an idle server", text) for text in idle_differences(scheduler)]
    return {
        "dp_rank": get_parallel().attn_dp_rank,
        "tp_rank": get_parallel().tp_rank,
        "idle": idle,
        "requests": sum(req.kv.req_pool_idx is not None for req in requests),
        "announced": _announced(scheduler.tree_cache),
        "pools": [{"of": pool.thing, "size": len(pool.ids), **pool.counts} for pool in found.pools],
        "wrong": len(findings),
        "findings": [{"what": what, "wrong": wrong} for what, wrong in findings[:MAX_FINDINGS]],
        "seconds": time.perf_counter() - begin,
    }


def _announced(cache: Any) -> dict[str, dict[str, int]]:
    """Return, by medium, the number of blocks that KV events have announced and the sum of their hashes."""
    events = getattr(cache, "events", None)
    media = {} if events is None else events.announced
    return {medium.value: {"blocks": len(blocks), "sum": sum(blocks)} for medium, blocks in media.items()}


def requests_of(scheduler: Any) -> list[Any]:
    """Return all requests of a scheduler: in batches, between chunks, in queues, also with a grammar that is compiled,
    and between two servers."""
    batches = [scheduler.running_batch, scheduler.last_batch]
    if scheduler.enable_overlap:
        batches += [batch for batch, _ in scheduler.result_queue]
    known = [req for batch in batches if batch is not None for req in batch.reqs]
    known += [req for req in (scheduler.chunked_req, *scheduler.waiting_queue) if req is not None]
    known += [*scheduler.grammar_manager.grammar_queue, *disaggregated_requests(scheduler)]
    return list({id(req): req for req in known}.values())
