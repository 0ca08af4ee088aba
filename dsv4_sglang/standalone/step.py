"""`Step`: the tokens of one forward pass, for a program that manages slots and blocks itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4_sglang.cache.step import StepMetadata
from dsv4_sglang.model.geometry import BLOCK_TOKENS, state_rows
from dsv4_sglang.standalone.lengths import Claim, Problem, RequestLengths

# Entry of a block table where a request has no block.
NO_BLOCK = -1


class _Requests(NamedTuple):
    """The B requests of a step.

    Attributes:
        ids: [B], their ids.
        query_start: [B + 1] int32, first token of each, then the number of tokens.
        owner: [T] int64, request of each token.
        is_decode: True for a decode step.
    """

    ids: Tensor
    query_start: Tensor
    owner: Tensor
    is_decode: bool

    @property
    def first(self) -> Tensor:
        return self.query_start[:-1].long()


@dataclass
class _Derived:
    """Values derived from a step's tensors.

    Attributes:
        problem: [B] int32, problem of each request if the step is not read back, 0 for none.
        recorded: True if derived while a CUDA graph was captured.
    """

    metadata: StepMetadata
    requests: _Requests
    problem: Tensor
    recorded: bool
    claim: Claim | None = None


class Step:
    """The tokens of one forward pass: T tokens of B requests. Tokens of a request are contiguous and in order.

    The constructor only stores the tensors. `metadata` is derived on first use and cached, so layers that share a step
    share that work.

    The derivation waits for the device once, to read the number of tokens of each request, and raises ValueError for a
    step that must not be written. With `tokens_per_request` nothing is read back: the step is a decode step with that
    many tokens of each request. The same holds for a step that is derived while a CUDA graph is captured, by default
    with one token per request. Replays read the given tensors, which keep their addresses. A replay cannot raise: it
    skips requests that must not be written, like padding, and `KVCacheManager.raise_if_skipped` raises for them. Use a
    step in one capture only.

    Args:
        request_slots: [T] int32 or int64, state slot of each token's request, -1 for padding tokens.
        positions: [T] int32 or int64, position of each token in its request.
        request_ids: [T] int, distinct numbers for the requests of the step.
        block_tables: [slots, blocks] int32, block ids of every state slot's request, -1 for none.
        lengths: tokens of each request in each layer.
        draft_tokens: maximum tokens per request that a decode step may write and the next one roll back (`state_rows`).
            The next step then begins at an earlier position.
        tokens_per_request: see above.

    Raises:
        ValueError: a tensor has a wrong shape, dtype or device, or `tokens_per_request` does not fit.
    """

    def __init__(
        self,
        request_slots: Tensor,
        positions: Tensor,
        request_ids: Tensor,
        block_tables: Tensor,
        lengths: RequestLengths,
        *,
        draft_tokens: int = 0,
        tokens_per_request: int | None = None,
    ) -> None:
        for name, tensor in (("request_slots", request_slots), ("positions", positions), ("request_ids", request_ids)):
            if tensor.dim() != 1 or tensor.shape != request_slots.shape:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}; expected one value per token, [{request_slots.numel()}]"
                )
            if tensor.dtype not in (torch.int32, torch.int64):
                raise ValueError(f"{name} is {tensor.dtype}; expected torch.int32 or torch.int64")
            if tensor.device != block_tables.device:
                raise ValueError(f"{name} is on {tensor.device}; the cache is on {block_tables.device}")
        most = max(draft_tokens, 1)
        if tokens_per_request is not None and not (
            1 <= tokens_per_request <= most and len(positions) % tokens_per_request == 0
        ):
            raise ValueError(
                f"tokens_per_request is {tokens_per_request} in a step of {len(positions)} tokens; expected 1 to "
                f"{most} (draft_tokens of the cache) and a divisor of the tokens"
            )
        self.request_slots = request_slots
        self.positions = positions
        self.request_ids = request_ids
        self.block_tables = block_tables
        self.draft_tokens = draft_tokens
        self.tokens_per_request = tokens_per_request
        self.lengths = lengths
        self._derived: _Derived | None = None
        self._appended: set[int] = set()

    @property
    def is_decode(self) -> bool:
        """True for one token of each request, or an equal number of tokens that the cache accepts for drafts.

        Attention then reads the rings, otherwise the window workspace of `append`.
        """
        return self.metadata.is_decode

    @property
    def metadata(self) -> StepMetadata:
        """Metadata for the layers."""
        return self._derive().metadata

    def _tokens_per_request(self) -> int | None:
        """Return the number of tokens per request, None if the step is read back to count them."""
        if self.tokens_per_request is None and _is_recorded(self.positions.device):
            return 1
        return self.tokens_per_request

    def _derive(self) -> _Derived:
        recorded = _is_recorded(self.positions.device)
        if self._derived is None or (recorded and not self._derived.recorded):
            self._derived = self._build(recorded)
            self._appended.clear()
        return self._derived

    def _build(self, recorded: bool) -> _Derived:
        per_request = self._tokens_per_request()
        requests = self._requests(per_request)
        first, owner, at = requests.first, requests.owner, self.positions.long()
        slots = self.request_slots[first].int()
        # A padding request gets the blocks of some slot, which are never read.
        block_table = self.block_tables[slots.long().clamp(0, self.block_tables.shape[0] - 1)]
        out_loc = self._out_loc(block_table[owner], at)
        problems = self._problems(requests, out_loc)
        problem = torch.zeros_like(slots)
        if per_request is None:
            self._raise_first(problems)
        else:
            problem = problems.view(len(slots), per_request).amin(1)
            problem = problem.masked_fill(problem > max(Problem), 0)
            slots = slots.masked_fill(problem > 0, -1)
        metadata = StepMetadata.build(
            slots=slots,
            prefix_lens=self.positions[first].int(),
            query_start=requests.query_start,
            token_request=owner.int(),
            positions=at,
            out_loc=out_loc,
            block_table=block_table,
            decode_ring_rows=state_rows(self.draft_tokens).ring if requests.is_decode else None,
        )
        return _Derived(metadata, requests, problem, recorded)

    def _requests(self, per_request: int | None) -> _Requests:
        """Divide the tokens into requests of `per_request` tokens. If it is None, find the requests as runs of equal
        request ids, which waits for the device.
        """
        tokens, device = len(self.positions), self.positions.device
        if per_request is not None:
            starts = torch.arange(0, tokens + 1, per_request, dtype=torch.int32, device=device)
            owner = torch.arange(tokens, device=device) // per_request
            return _Requests(self.request_ids[starts[:-1].long()], starts, owner, True)
        ids, owner, counts = torch.unique_consecutive(self.request_ids, return_inverse=True, return_counts=True)
        starts = pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        each, rest = divmod(tokens, max(len(ids), 1))
        is_decode = not rest and each <= max(self.draft_tokens, 1)
        return _Requests(ids, starts, owner, is_decode and (each <= 1 or bool((counts == each).all())))

    def _problems(self, requests: _Requests, out_loc: Tensor) -> Tensor:
        """Return [T] int32, the `Problem` of each token with the lowest number, a number above all problems if it has
        none.
        """
        first, owner = requests.first, requests.owner
        at, slots, last = self.positions.long(), self.request_slots.long(), self.block_tables.shape[0] - 1
        offset = torch.arange(len(owner), device=owner.device) - first[owner]
        taken = slots[first]
        found = torch.full_like(slots, max(Problem) + 1, dtype=torch.int32)
        for problem, wrong in (
            (Problem.NO_BLOCK, (slots >= 0) & (out_loc < 0)),
            (Problem.SHARED_SLOT, (_repeats(taken) & (taken >= 0))[owner]),
            (Problem.NO_SUCH_SLOT, (slots < -1) | (slots > last)),
            (Problem.SEVERAL_SLOTS, slots != taken[owner]),
            (Problem.NEGATIVE, at < 0),
            (Problem.NOT_CONSECUTIVE, at != at[first][owner] + offset),
            (Problem.IDS, (self.request_ids != requests.ids[owner]) | _repeats(requests.ids)[owner]),
        ):
            found = found.masked_fill(wrong, problem)
        return found

    def _raise_first(self, problems: Tensor) -> None:
        """Raise ValueError for the lowest of `problems` and the first token that has it. Waits for the device."""
        if not len(problems):
            return
        lowest, token = (int(value) for value in problems.min(0))
        if lowest <= max(Problem):
            slot, position = int(self.request_slots[token]), int(self.positions[token])
            raise ValueError(Problem(lowest).describe(slot, position, self.block_tables.shape[0]))

    @staticmethod
    def _out_loc(blocks: Tensor, at: Tensor) -> Tensor:
        """Return [T] int64, block id * 128 + position mod 128; negative if `blocks` [T, blocks] has no block for the
        position.
        """
        index = at // BLOCK_TOKENS
        block = blocks.gather(1, index.clamp(0, blocks.shape[1] - 1)[:, None]).squeeze(1).long()
        block = block.masked_fill(index >= blocks.shape[1], NO_BLOCK)
        return block * BLOCK_TOKENS + at % BLOCK_TOKENS

    def begin_append(self, layer: int) -> StepMetadata:
        """Return the metadata for the append of a layer, without the requests that the layer must skip.

        Raises:
            ValueError: the layer has already appended the step. If the step is read back, also for a step that must not
                be written and for a request whose tokens in this layer do not end where the step begins.
        """
        derived = self._derive()
        if layer in self._appended:
            raise ValueError(f"layer {layer} has already appended this step; begin another step")
        claim = self._claim(derived, layer)
        return replace(derived.metadata, slots=claim.slots[layer])

    def end_append(self, layer: int) -> None:
        """Record that the layer has the step's tokens."""
        derived = self._derive()
        assert derived.claim is not None
        self.lengths.commit(layer, derived.claim)
        self._appended.add(layer)

    def _claim(self, derived: _Derived, layer: int) -> Claim:
        lengths = self.lengths
        if derived.claim is None or lengths.claimed_by is not self:
            step = derived.metadata
            end = step.prefix_lens + step.query_start.diff()
            may_roll_back = step.is_decode and self.draft_tokens > 1
            after = torch.stack((step.prefix_lens + 1 if may_roll_back else end, end), -1)
            given = self.request_slots[derived.requests.first].int()
            # The last launches of `claim` write `rows` and `values`, which `append` does not read: in a CUDA graph
            # `append` starts to read the batch while the launch before it still runs.
            derived.claim = lengths.claim(given, step.prefix_lens, after, derived.problem)
            lengths.claimed_by = self
            if self._tokens_per_request() is None:
                outside = derived.claim.outside.cpu()
                derived.claim = derived.claim._replace(outside=outside)
        if self._tokens_per_request() is None and bool(derived.claim.outside[layer].any()):
            wrong = int(derived.claim.outside[layer].int().argmax())
            token = int(derived.requests.first[wrong])
            raise ValueError(lengths.expected(layer, int(self.request_slots[token]), int(self.positions[token])))
        return derived.claim


def _is_recorded(device: torch.device) -> bool:
    """Return True while a CUDA graph is captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _repeats(values: Tensor) -> Tensor:
    """Return [n] bool, True if an earlier value is equal."""
    return (values[:, None] == values).tril(-1).any(1)
