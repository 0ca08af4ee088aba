"""Estimate of the point from which the next prompt of a conversation resumes: end of an answer, end of a prompt, or an
earlier position."""

from __future__ import annotations

from enum import IntEnum

# Least probability that a snapshot is needed of which later ones on its branch cover more. A conversation normally
# resumes from its end; only an edited or repeated turn resumes from an earlier snapshot.
# `benchmarks/prefix_simulation.py` hits 98.1 % with 1/16, 97.4 % with 1/4, 97.7 % with 1/64.
SUPERSEDED = 1 / 16

# Requests over which the probabilities are averaged (exponentially), and the number that they begin with.
MEMORY = 64
FIRST = 16

# Probability before the first return that a prompt leaves out the answer. Ends of prompts then outlast the snapshots
# before them: while many first turns wait for their second ones, nothing is learned. Of simulated agents that leave
# out their answers, first second turns hit 97 to 99 %, with 0 they hit 90 to 95 %.
LEFT_OUT = 1 / 4


class ResumePoint(IntEnum):
    """Place of a snapshot in the turn that took it, ascending by length.

    The next prompt of a conversation resumes

    - `ANSWER`: at the end of the answer, if it repeats prompt and answer;
    - `PROMPT`: at the end of the prompt, if it leaves out the answer or a part of it. Templates of chats leave out the
      reasoning of earlier turns;
    - `WITHIN`: before the end of the prompt, if that has changed, too.
    """

    WITHIN = 0
    PROMPT = 1
    ANSWER = 2


# Where a conversation goes on whose next prompt leaves the path before a snapshot, by the place of that snapshot. A
# prompt that leaves it before another may begin a conversation of its own.
BEFORE = {ResumePoint.PROMPT: ResumePoint.WITHIN, ResumePoint.ANSWER: ResumePoint.PROMPT}


class ResumeEstimate:
    """Probabilities of the resume points, over the last requests that went on with a conversation."""

    def __init__(self) -> None:
        """Begin as if LEFT_OUT of the earlier prompts had left out the answer, and the others had repeated it."""
        self.probability = [0.0] * len(ResumePoint)
        self.probability[ResumePoint.PROMPT], self.probability[ResumePoint.ANSWER] = LEFT_OUT, 1 - LEFT_OUT
        self._count = FIRST

    def count(self, point: ResumePoint) -> None:
        """Count a request that went on at `point`."""
        self._count = min(self._count + 1, MEMORY)
        self.probability = [(1 - 1 / self._count) * probability for probability in self.probability]
        self.probability[point] += 1 / self._count

    def needed(self, point: int, after: int | None = None) -> float:
        """Return the probability that a conversation goes on at a snapshot, at least SUPERSEDED.

        Args:
            point: resume point of the snapshot.
            after: resume point of the next snapshot on the branch. None: it is the last.
        """
        return max(SUPERSEDED, sum(self.probability[point:after]))
