"""Base class of KV and key formats: an enum with integer codes, by which the ops identify formats."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self


class CodedFormat(enum.Enum):
    """A format whose code is its index among the members, as in the enum of the same name in csrc/entries.h."""

    def __init__(self, name: str) -> None:
        self.code = len(type(self).__members__)

    @classmethod
    def from_code(cls, code: int) -> Self:
        """Return the format with this code. Raise ValueError for an unknown code."""
        for member in cls:
            if member.code == code:
                return member
        known = ", ".join(f"{member.code} ({member.value})" for member in cls)
        raise ValueError(f"{cls.__name__} {code}; expected {known}")
