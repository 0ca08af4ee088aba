"""SGLang's scheduler and its workers on a CPU, without HTTP. Its own event loop serves requests from a test.

The process needs the environment of `launch.command.cpu_environment`. A process has one scheduler. `Child` runs a
scheduler in a fork, so a test can use several with one import of SGLang.
"""

from __future__ import annotations

import json
import multiprocessing
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.arg_groups import speculative_hook
from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.models import registry  # noqa: F401  imports all models once for all forks
from sglang.srt.plugins import load_plugins
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from torch import Tensor

from dsv4_sglang.cache.state_cache import StateStorage
from dsv4_sglang.model.geometry import CSA_RATIO, HCA_RATIO, WINDOW
from dsv4_sglang.model.layer_schedule import AttentionType
from dsv4_sglang.srt.features.integrity.owners import REQUESTS
from dsv4_sglang.srt.features.integrity.report import report


@dataclass(frozen=True)
class Asked:
    """A greedy request.

    Attributes:
        count: Number of tokens to generate.
        follows: The expected answer, from which drafts are taken. If empty, the draft model makes the drafts.
        right: Probability that a draft from `follows` is correct.
        space: Name space of the prefix cache.
        stop: Token that ends the answer.
    """

    prompt: list[int]
    count: int
    follows: list[int] = field(default_factory=list)
    right: float = 0.7
    space: str | None = None
    stop: int | None = None


@dataclass(frozen=True)
class Answer:
    """The result of a request.

    Attributes:
        verified: Number of verify steps.
        text: Prompt and all accepted tokens.
        length: Number of tokens of `text` in the cache at the end.
        state: Live contents of the state slot at the end, by name.
    """

    tokens: list[int]
    logprobs: list[float]
    cached: int
    verified: int
    retracted: int
    text: list[int]
    length: int
    state: dict[str, Tensor]
    reason: dict[str, Any]


def alive(storage: StateStorage, slot: int, length: int) -> dict[str, Tensor]:
    """Copy the entries of a slot that a request of `length` tokens may still read, oldest entries first."""
    layout = storage.layout
    window = torch.arange(max(0, length - WINDOW + 1), length) % layout.ring_rows
    found = {f"ring {layer}": storage.ring(layer)[slot, window].clone() for layer in range(len(layout.schemas))}
    for layer in layout.layers(AttentionType.CSA):
        compressor_state, sizes = storage.compressor_state(layer)[slot], layout.schemas[layer].rows.csa
        begin = length // CSA_RATIO * CSA_RATIO
        current = torch.arange(begin, length) % sizes.current
        previous = torch.arange(max(0, begin - CSA_RATIO), length) % sizes.previous
        rows = [current, sizes.current_z + current, sizes.previous_k + previous, sizes.previous_z + previous]
        found[f"CSA compressor state {layer}"] = compressor_state[torch.cat(rows)].clone()
    for layer in layout.layers(AttentionType.HCA):
        if length % HCA_RATIO:
            state_copies = storage.compressor_state(layer)[slot].unflatten(0, (-1, 3))
            found[f"HCA compressor state {layer}"] = state_copies[length % len(state_copies)].clone()
    return found


class Drafts:
    """Replaces the output of `EagleDraftWorker.draft_forward` by drafts that are correct with a given probability.

    The draft model still runs.
    """

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)
        self.asked: dict[str, Asked] = {}
        self.requests: list[Any] = []
        draft, forward = EagleDraftWorker.draft, EagleDraftWorker.draft_forward

        def noted(worker: Any, batch: Any, **arguments: Any) -> Any:
            self.requests = list(batch.reqs)
            return draft(worker, batch, **arguments)

        def drafted(worker: Any, batch: Any) -> Any:
            parents, index, tokens, probabilities = forward(worker, batch)
            return parents, index, self.of(tokens.clone(), batch.seq_lens.tolist()), probabilities

        EagleDraftWorker.draft, EagleDraftWorker.draft_forward = noted, drafted

    def of(self, tokens: Tensor, lengths: list[int]) -> Tensor:
        for row, (req, length) in enumerate(zip(self.requests, lengths)):
            asked = self.asked[req.rid]
            if not asked.follows:
                continue
            # The request's newest token is not in the cache yet, so the drafts start after it.
            known = torch.tensor((asked.prompt + asked.follows)[length + 1 : length + 1 + tokens.shape[1]])
            wrong = torch.rand(len(known), generator=self.generator) >= asked.right
            tokens[row, : len(known)] = torch.where(wrong, (known + 1) % 384, known)
        return tokens


class InProcess:
    """A scheduler with fp32 KV entries and keys.

    EAGLE makes `draft_tokens`; `flags` are fields of SGLang's ServerArgs.
    """

    def __init__(self, model: Path, draft_tokens: int, overlap: bool, **flags: Any) -> None:
        load_plugins()
        if overlap:
            speculative_hook._disable_overlap_schedule_for_cpu = lambda server_args: None
            torch.Tensor.record_stream = lambda self, stream: None
        settings: dict[str, Any] = {
            "model_path": str(model),
            "device": "cpu",
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "log_level": "warning",
            "chunked_prefill_size": 256,
            "speculative_algorithm": "EAGLE",
            "speculative_num_steps": draft_tokens - 1,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": draft_tokens,
            "disable_overlap_schedule": not overlap,
        }
        options = {"entry_format": "fp32", "indexer_format": "fp32"}
        args = ServerArgs(**{**settings, **flags}, json_model_override_args=json.dumps({"dsv4_sglang": options}))
        ranks = scheduler_module.SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0)
        scheduler_module.publish(args, role="scheduler", ranks=ranks)
        scheduler_module.configure_scheduler_process(args, 0)
        self.scheduler = scheduler_module.Scheduler(args, PortArgs.init_new(args))
        self.scheduler.get_init_info()
        assert self.scheduler.enable_overlap == overlap
        self.pools = self.scheduler.req_to_token_pool
        self.drafts = Drafts()
        self.released: dict[str, tuple[Any, int, dict[str, Tensor]]] = {}
        self.most_running = 0
        self.pools.free_mamba_cache = partial(self._release, self.pools.free_mamba_cache)
        for channel in (
            self.scheduler.ipc_channels.send_to_detokenizer,
            self.scheduler.ipc_channels.send_to_tokenizer,
        ):
            channel.send_output = lambda *args, **kwargs: None

    @property
    def storage(self) -> StateStorage:
        return self.pools.mamba_pool.storage

    def serve(self, asked: Sequence[Asked], orders: Sequence[tuple[int, list[Any]]] = ()) -> list[Answer]:
        """Serve all requests at once until the scheduler is idle. Then assert that no request holds memory.

        Afterwards `most_running` is the largest number of requests that decoded together.

        Args:
            orders: Control requests as (n, requests). Each list is sent once a request has generated n tokens.
        """
        scheduler = self.scheduler
        arriving = [self._input(str(i), request) for i, request in enumerate(asked)]
        self.drafts.asked = {str(i): request for i, request in enumerate(asked)}
        self.released.clear()
        self.most_running = 0
        left, turns, generated = list(orders), 0, 0

        def receive(local_reqs: list[Any]) -> list[Any]:
            nonlocal turns, generated
            turns += 1
            assert turns < 5000 and not local_reqs, "the requests do not end, or timed out"
            self._check()
            self.most_running = max(self.most_running, len(scheduler.running_batch.reqs))
            generated = max([generated, *(len(req.output_ids) for req in scheduler.running_batch.reqs)])
            if turns > 1 and left and generated >= left[0][0]:
                return left.pop(0)[1]
            ended = sum(req.finished() for req, *_ in self.released.values())
            scheduler.gracefully_exit = ended == len(asked) and scheduler.last_batch is None and not left
            return arriving if turns == 1 else []

        scheduler.gracefully_exit = False
        scheduler.request_receiver = SimpleNamespace(recv_requests=receive)
        scheduler.run_event_loop()
        scheduler.on_idle()
        self._let_copies_end()
        self._check_all_is_given_back()
        return [self._answer(*self.released[str(i)]) for i in range(len(asked))]

    def _release(self, original: Callable[[Any], None], req: Any) -> None:
        """Record a request and its state before it frees its slot."""
        length = req.kv.kv_committed_len
        self.released[req.rid] = req, length, alive(self.storage, int(req.kv.mamba_pool_idx), length)
        original(req)

    def _input(self, name: str, asked: Asked) -> TokenizedGenerateReqInput:
        stops = None if asked.stop is None else [asked.stop]
        sampling = SamplingParams(
            max_new_tokens=asked.count, temperature=0, ignore_eos=stops is None, stop_token_ids=stops
        )
        sampling.normalize(None)
        return TokenizedGenerateReqInput(
            rid=name,
            input_text=None,
            input_ids=array("q", asked.prompt),
            input_embeds=None,
            token_type_ids=None,
            mm_inputs=None,
            sampling_params=sampling,
            return_logprob=True,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
            extra_key=asked.space,
        )

    def _answer(self, req: Any, length: int, state: dict[str, Tensor]) -> Answer:
        count = len(req.output_ids_through_stop)
        return Answer(
            tokens=list(req.output_ids_through_stop),
            logprobs=list(req.logprob.output_token_logprobs_val)[:count],
            cached=req.cached_tokens,
            verified=req.spec_verify_ct,
            retracted=req.retraction_count,
            text=[*req.origin_input_ids, *req.output_ids],
            length=length,
            state=state,
            reason=req.finished_reason.to_json(),
        )

    def flush(self) -> None:
        assert self.scheduler.flush_cache()

    def _let_copies_end(self) -> None:
        """With a host cache, complete the pending writes and process their results."""
        if self.scheduler.enable_hierarchical_cache:
            for _ in range(2):
                self.scheduler.tree_cache.check_hicache_events()

    def evict(self) -> None:
        """Evict all unlocked nodes from the prefix cache, or with a host cache from the device."""
        self.scheduler.tree_cache.evict(EvictParams(num_tokens=self.scheduler.token_to_kv_pool_allocator.size))

    def _check(self) -> dict[str, Any]:
        """Return the report of the integrity check. Assert that it has no findings."""
        found = report(self.scheduler)
        assert not found["findings"], found
        return found

    def _check_all_is_given_back(self) -> None:
        found = self._check()
        assert found["idle"] and not found["requests"]
        assert all(pool[REQUESTS] == 0 for pool in found["pools"])


# The scheduler of this process, if the process is a child.
_server: InProcess | None = None


def _start(arguments: tuple[Any, ...], flags: dict[str, Any]) -> None:
    global _server
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    _server = InProcess(*arguments, **flags)


def _do(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    assert _server is not None
    return function(_server, *arguments)


class Child:
    """A scheduler in a fork of this process."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self.pool = pool

    def do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of `function(server, *arguments)` in the child. `function` must be defined in a module."""
        return self.pool.submit(_do, function, arguments).result()


@contextmanager
def child(*arguments: Any, **flags: Any) -> Iterator[Child]:
    """Start a child with the `arguments` and `flags` of `InProcess`."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        pool.submit(_start, arguments, flags).result()
        yield Child(pool)
