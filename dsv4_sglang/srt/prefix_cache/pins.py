"""Pinned conversations: locks of SGLang's tree that keep paths on the device for a time, up to a limit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.mem_cache.unified_cache.components import ComponentType

from dsv4_sglang.srt.prefix_cache.tenants import NO_LIMIT
from dsv4_sglang.srt.sglang.tree import length_of

if TYPE_CHECKING:
    from dsv4_sglang.srt.prefix_cache.cache import PrefixCache

# Tenant and name of a pin.
PinKey = tuple[str, str]


class Pin(NamedTuple):
    """A pinned path.

    Attributes:
        tokens: length of the path, which the pin is charged with, also for what it shares with other pins.
        until: time in seconds at which the pin ends.
        lock: SGLang's lock on the path and on the snapshot at its end.
    """

    tokens: int
    until: float
    lock: Any


class Pins:
    """The pins of a prefix cache. SGLang evicts nothing that is locked, so no other tenant can evict a pin, and its
    counts of evictable tokens leave pins out.

    A request that will pin is checked when it arrives (`check`). Until it ends it is charged with its prompt and the
    longest answer, so that a pin that was accepted never fails for lack of room.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._pins: dict[PinKey, Pin] = {}
        # Limits of the charged tokens and of the pins. Each pin holds a snapshot slot.
        self.most_tokens = self.most_pins = 0
        # Largest share of one tenant in `most_tokens`, in percent.
        self.tenant_percent = NO_LIMIT

    def __iter__(self) -> Iterator[tuple[PinKey, Pin]]:
        return iter(self._pins.items())

    @property
    def tokens(self) -> int:
        """Tokens that all pins are charged with."""
        return sum(pin.tokens for pin in self._pins.values())

    def check(self, key: PinKey, tokens: int, unfinished: Iterable[tuple[PinKey, int]]) -> None:
        """Check that a new request can pin its conversation when it ends.

        Args:
            key: tenant and name of the pin. A pin of the same key will be replaced.
            tokens: tokens of the prompt and of the longest answer.
            unfinished: keys and tokens of the earlier requests that will pin.

        Raises:
            ValueError: the limit is used up.
        """
        charged: dict[PinKey, int] = {of: pin.tokens for of, pin in self._pins.items()}
        for of, asked in unfinished:
            charged[of] = max(charged.get(of, 0), asked)
        charged.pop(key, None)
        self._check_limits(key, tokens, charged)

    def _check_limits(self, key: PinKey, tokens: int, others: Mapping[PinKey, int]) -> None:
        used = sum(others.values())
        if used + tokens > self.most_tokens:
            raise ValueError(
                f"kv_hints: the pin {key[1]!r} asks for {tokens} tokens, the prompt and max_new_tokens. Pins may hold "
                f"{self.most_tokens} tokens of this cache (option pin_percent), of which {used} are used. Ask for "
                f"fewer, release a pin (seconds 0), or wait until one ends"
            )
        if len(others) + 1 > self.most_pins:
            raise ValueError(
                f"kv_hints: the pin {key[1]!r} asks for a snapshot slot. Pins may hold {self.most_pins} slots of this "
                f"cache (option pin_percent), of which {len(others)} are used. Release a pin (seconds 0), or wait "
                f"until one ends"
            )
        own = sum(amount for (tenant, _), amount in others.items() if tenant == key[0])
        if 100 * (own + tokens) > self.tenant_percent * self.most_tokens:
            raise ValueError(
                f"kv_hints: the pin {key[1]!r} asks for {tokens} tokens, the prompt and max_new_tokens. Pins of one "
                f"tenant may hold {self.most_tokens * self.tenant_percent // 100} tokens of this cache (option "
                f"tenant_percent), of which {own} are used. Ask for fewer, release a pin (seconds 0), or wait until "
                f"one ends"
            )

    def pin(self, key: PinKey, node: Any, until: float) -> bool:
        """Pin the path to a node that has a snapshot on the device. Return False if the node has none.

        Args:
            key: tenant and name, which have no pin.
            node: tree node.
            until: time in seconds at which the pin ends.
        """
        if node.component_data[ComponentType.MAMBA].value is None:
            return False
        tokens = length_of(node)
        self._pins[key] = Pin(tokens, until, self._cache.lock(node.id))
        return True

    def release(self, key: PinKey) -> None:
        """Release a pin, if there is one of this key."""
        if (pin := self._pins.pop(key, None)) is not None:
            self._cache.unlock(pin.lock)

    def expire(self, now: float) -> None:
        """Release the pins whose time is over at `now`, in seconds. Called once a second."""
        for key in [key for key, pin in self._pins.items() if pin.until <= now]:
            self.release(key)

    def release_all(self) -> None:
        for key in list(self._pins):
            self.release(key)

    def forget(self) -> None:
        """Drop all pins without unlocking, after the tree was emptied."""
        self._pins.clear()
