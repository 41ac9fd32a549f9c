"""Census of the ranks: what all of them do, told along a tree. Pure: neither sockets nor a clock.

A rank that wants to know asks its neighbours in the tree what the ranks behind them do; these ask theirs, and the
answers are added up on their way back. An answer that is at most ``FRESH`` seconds old when it is asked for is used
again: so it takes about 4 messages a rank at most, however many ranks ask. Who does not answer in time counts as
silent, with all ranks behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from matex_data.mpi.activity import RankState

FAN_OUT = 32
"""Ranks below each rank of the tree: 10,000 ranks have three levels below the first."""
FRESH = 2.0
"""Seconds for which an answer counts as true."""
ANSWER_TIME = 3.0
"""Seconds for each rank on the way to the farthest one that an answer may take."""
KEPT = 5
"""Ranks of each state of which a summary has the activity or the location."""


class Tree:
    """Tree of ranks with rank 0 at the top, each with at most ``FAN_OUT`` ranks below it.

    Examples
    --------
    >>> tree = Tree(100)
    >>> tree.below(0)[-1], tree.below(3), tree.above(99), tree.neighbours(3)
    (32, [97, 98, 99], 3, [0, 97, 98, 99])
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._depth = self.depth(size - 1)

    def above(self, rank: int) -> int:
        """Return the rank above one that is not 0."""
        return (rank - 1) // FAN_OUT

    def below(self, rank: int) -> list[int]:
        """Return the ranks right below a rank."""
        first = rank * FAN_OUT + 1
        return list(range(first, min(first + FAN_OUT, self.size)))

    def neighbours(self, rank: int) -> list[int]:
        """Return the ranks above and below a rank."""
        return ([self.above(rank)] if rank else []) + self.below(rank)

    def depth(self, rank: int) -> int:
        """Return the number of ranks above a rank."""
        return 1 + self.depth(self.above(rank)) if rank else 0

    def towards(self, rank: int, destination: int) -> int:
        """Return the neighbour of a rank that lies on the way to another rank.

        Examples
        --------
        >>> tree = Tree(100)
        >>> tree.towards(0, 98), tree.towards(3, 98), tree.towards(98, 5)
        (3, 98, 3)
        """
        while destination > rank:
            above = self.above(destination)
            if above == rank:
                return destination
            destination = above
        return self.above(rank)

    def behind(self, rank: int, neighbour: int) -> int:
        """Return the number of ranks that a neighbour of a rank connects with it."""
        return self._in_branch(neighbour) if neighbour > rank else self.size - self._in_branch(rank)

    def patience(self, rank: int, neighbour: int) -> float:
        """Return the seconds in which a neighbour of a rank has to answer for all ranks behind it."""
        depth = self.depth(neighbour)
        return ANSWER_TIME * (1 + (self._depth - depth if neighbour > rank else self._depth + depth))

    def _in_branch(self, rank: int) -> int:
        count, first, last = 0, rank, rank
        while first < self.size:
            count += min(last, self.size - 1) - first + 1
            first, last = first * FAN_OUT + 1, last * FAN_OUT + FAN_OUT
        return count


@dataclass(frozen=True)
class RankStates:
    """States of a set of ranks.

    Parameters
    ----------
    counts : number of ranks in each state.
    found : by state, the lowest ``KEPT`` ranks with their activity or location; of silent ones the nearest.
    meeting : number of ranks that are in a meeting of all ranks.
    met : number of meetings that these have begun so far; it stays as long as none of them goes on.
    lines : two of the lines at which they are, at most, without folders.
    """

    counts: dict[RankState, int] = field(default_factory=dict)
    found: dict[RankState, dict[int, str]] = field(default_factory=dict)
    meeting: int = 0
    met: int = 0
    lines: frozenset[str] = frozenset()

    @classmethod
    def of(cls, rank: int, state: RankState, text: str = "", met: int | None = None) -> RankStates:
        """Return the summary of one rank, which is in a meeting if ``met`` is not None."""
        lines = frozenset() if met is None else frozenset([text.rpartition("/")[2]])
        return cls({state: 1}, {state: {rank: text}}, int(met is not None), met or 0, lines)

    def __add__(self, other: RankStates) -> RankStates:
        """Return the summary of both sets, which have no rank in common."""
        counts = {s: self.count(s) + other.count(s) for s in RankState if self.count(s) or other.count(s)}
        found = {s: dict(sorted((self.ranks(s) | other.ranks(s)).items())[:KEPT]) for s in counts}
        lines = self.lines | other.lines
        lines = lines if len(lines) < 3 else frozenset(sorted(lines)[:2])
        return RankStates(counts, found, self.meeting + other.meeting, self.met + other.met, lines)

    @property
    def ranks_met(self) -> int | None:
        """Number of meetings so far if all ranks are in one, at different lines; None if not."""
        return self.met if self.meeting == sum(self.counts.values()) and len(self.lines) > 1 else None

    def count(self, state: RankState) -> int:
        """Return the number of ranks in a state."""
        return self.counts.get(state, 0)

    def ranks(self, state: RankState) -> dict[int, str]:
        """Return the lowest ranks in a state, in ascending order, with their activity or location."""
        return self.found.get(state, {})


class Answer(NamedTuple):
    """Summary of the ranks behind a neighbour, and its age in seconds."""

    age: float
    summary: RankStates


Sent = tuple[int, Answer | None]
"""Receiver, and the answer for it; None asks it for one."""


class Census:
    """One rank's share in each census. Not safe for threads; times are seconds since any fixed moment.

    Parameters
    ----------
    rank, size : this rank and the number of ranks.
    own_state : function that returns the state of this rank, its activity or location, and `activity.meetings`.

    Examples
    --------
    >>> from matex_data.mpi.activity import RankState
    >>> census = Census(0, 1, lambda: (RankState.RUNNING, "a.py, line 1"))
    >>> census.ask(0, now=0.0)
    >>> census.tick(now=0.1)
    []
    >>> census.result(since=0.0).counts
    {<RankState.RUNNING: 0>: 1}
    """

    def __init__(self, rank: int, size: int, own_state: Callable[[], tuple[Any, ...]]) -> None:
        self._rank, self._own_state = rank, own_state
        self._tree = Tree(size)
        self._asking: dict[int, float] = {}  # by rank that waits for an answer: since when
        self._asked: dict[int, float] = {}  # by neighbour that has not answered: the end of its time
        self._known: dict[int, tuple[float, RankStates]] = {}  # by neighbour, and of all ranks by this one: as of when

    def ask(self, rank: int, now: float) -> None:
        """Note that this rank, or a neighbour, asks for a census; ``tick`` has the answer."""
        self._asking.setdefault(rank, now)

    def result(self, since: float) -> RankStates | None:
        """Return the result of the last census of this rank; None unless it was complete later than ``since``."""
        time, summary = self._known.get(self._rank, (float("-inf"), None))
        return summary if time >= since else None

    def receive(self, neighbour: int, answer: Answer, now: float) -> None:
        """Take in the answer of a neighbour."""
        self._asked.pop(neighbour, None)
        self._known[neighbour] = now - answer.age, answer.summary

    def tick(self, now: float) -> list[Sent]:
        """Look for what is due, and return the messages to send."""
        for neighbour, end in list(self._asked.items()):
            if now >= end:
                count = self._tree.behind(self._rank, neighbour)
                silent = RankStates({RankState.SILENT: count}, {RankState.SILENT: {neighbour: ""}})
                self.receive(neighbour, Answer(0.0, silent), now)
        sent: list[Sent] = []
        for rank, since in list(self._asking.items()):
            others = [neighbour for neighbour in self._tree.neighbours(self._rank) if neighbour != rank]
            missing = [other for other in others if self._time(other) < since - FRESH]
            for neighbour in set(missing) - self._asked.keys():
                self._asked[neighbour] = now + self._tree.patience(self._rank, neighbour)
                sent.append((neighbour, None))
            if not missing:
                sent += self._answer(rank, others, now)
        return sent

    def _answer(self, rank: int, others: list[int], now: float) -> list[Sent]:
        """Answer a rank, and return what to send."""
        del self._asking[rank]
        total = sum((self._known[other][1] for other in others), RankStates.of(self._rank, *self._own_state()))
        if rank == self._rank:
            self._known[rank] = now, total
            return []
        return [(rank, Answer(now - min(map(self._time, others), default=now), total))]

    def _time(self, neighbour: int) -> float:
        time, _ = self._known.get(neighbour, (float("-inf"), None))
        return time
