"""Census of the ranks: what all of them do, gathered over a tree. Pure: neither MPI nor a clock.

A rank that waits asks for a census. The wish goes up a tree to its root; a query comes down, reports go up, merged on
their way, and the result comes down to those that have asked. The wishes of many ranks make one census, and its result
answers those of the next ``FRESH`` seconds. So it takes about 4 messages a rank at most, however many ranks wait.

If a rank does not report, the one above it queries the ranks below it. If the root does not answer, the next census has
another root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from matex_data.mpi.activity import State

FAN_OUT = 32
"""Ranks below each rank of the tree: 10,000 ranks have three levels below the root."""
FRESH = 2.0
"""Seconds in which the result of a census answers further wishes."""
ANSWER_TIME = 3.0
"""Seconds in which a rank has to report."""
ROOTS = 3
"""Ranks that are tried as roots, from 0 on."""
KEPT = 5
"""Ranks of each state of which a summary has the activity or the location."""


class Tree:
    """Tree of ranks, each with at most ``FAN_OUT`` ranks below it.

    Parameters
    ----------
    root : rank at the top.
    size : number of ranks.
    """

    def __init__(self, root: int, size: int) -> None:
        self._root, self._size = root, size

    def above(self, rank: int) -> int:
        """Return the rank above one that is not the root."""
        return (((rank - self._root) % self._size - 1) // FAN_OUT + self._root) % self._size

    def below(self, rank: int) -> list[int]:
        """Return the ranks right below a rank."""
        first = (rank - self._root) % self._size * FAN_OUT + 1
        return [(position + self._root) % self._size for position in range(first, min(first + FAN_OUT, self._size))]


def levels(size: int) -> int:
    """Return the number of levels of the tree below its root."""
    last, count = size - 1, 0
    while last > 0:
        last, count = (last - 1) // FAN_OUT, count + 1
    return count


def longest(size: int) -> float:
    """Return the longest time of a census in seconds, in which ranks of every level do not answer."""
    return ANSWER_TIME * (levels(size) + 1)


@dataclass(frozen=True)
class Summary:
    """States of a set of ranks.

    Parameters
    ----------
    counts : number of ranks in each state.
    found : by state, the lowest ``KEPT`` ranks with their activity or location.
    """

    counts: dict[State, int] = field(default_factory=dict)
    found: dict[State, dict[int, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, rank: int, state: State, text: str = "") -> Summary:
        """Return the summary of one rank."""
        return cls({state: 1}, {state: {rank: text}})

    def __add__(self, other: Summary) -> Summary:
        """Return the summary of both sets, which have no rank in common."""
        counts = {s: self.count(s) + other.count(s) for s in State if self.count(s) or other.count(s)}
        found = {s: dict(sorted((self.ranks(s) | other.ranks(s)).items())[:KEPT]) for s in counts}
        return Summary(counts, found)

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return sum(self.counts.values())

    def count(self, state: State) -> int:
        """Return the number of ranks in a state."""
        return self.counts.get(state, 0)

    def ranks(self, state: State) -> dict[int, str]:
        """Return the lowest ranks in a state, in ascending order, with their activity or location."""
        return self.found.get(state, {})


class Kind(IntEnum):
    """Kind of a message."""

    WISH = 0
    QUERY = 1
    REPORT = 2
    RESULT = 3


class Message(NamedTuple):
    """Message of a census: its kind, the root, the number of the census at this root, and what was found."""

    kind: Kind
    root: int
    number: int = 0
    summary: Summary = Summary()


Sent = tuple[int, Message]
"""Receiver and message."""


@dataclass
class _Round:
    """One census, as a rank takes part in it."""

    number: int
    begin: float
    reports_to: int | None  # None: this rank is the root
    total: Summary
    unsent: Summary
    missing: dict[int, float] = field(default_factory=dict)  # by rank that has not reported: the end of its time
    silent: set[int] = field(default_factory=set)
    complete: bool = False


class Census:
    """One rank's share in each census. Not safe for threads; times are seconds since any fixed moment.

    Parameters
    ----------
    rank, size : this rank and the number of ranks.
    own_state : function that returns the state of this rank and its activity or location.

    Examples
    --------
    >>> from matex_data.mpi.activity import State
    >>> census = Census(0, 1, lambda: (State.RUNNING, "a.py, line 1"))
    >>> census.ask(root=0, now=0.0)
    >>> census.tick(now=0.1)
    []
    >>> census.result(root=0, now=0.1).counts
    {<State.RUNNING: 0>: 1}
    """

    def __init__(self, rank: int, size: int, own_state: Callable[[], tuple[State, str]]) -> None:
        self._rank, self._size, self._own_state = rank, size, own_state
        self._rounds: dict[int, _Round] = {}  # by root, like all that follow
        self._asking: dict[int, set[int]] = {}  # ranks that wait for a result
        self._asked: dict[int, float] = {}  # time of the wish that is on its way up
        self._results: dict[int, tuple[float, Summary]] = {}
        self._out: list[Sent] = []

    def ask(self, root: int, now: float) -> None:
        """Ask for a census; the ``result`` comes later."""
        self._on_wish(self._rank, root, now)

    def result(self, root: int, now: float) -> Summary | None:
        """Return the result of the last census with this root; None if it is older than ``FRESH`` seconds."""
        time, summary = self._results.get(root, (float("-inf"), Summary()))
        return summary if now - time <= FRESH else None

    def receive(self, source: int, message: Message, now: float) -> None:
        """Take in a message of rank ``source``."""
        kind, root, number, summary = message
        if kind == Kind.WISH:
            self._on_wish(source, root, now)
        elif kind == Kind.QUERY:
            self._on_query(source, root, number, now)
        elif kind == Kind.REPORT:
            self._on_report(source, root, number, summary)
        else:
            self._publish(root, summary, now)

    def tick(self, now: float) -> list[Sent]:
        """Look for what is due, and return the messages to send. Call it after a series of messages."""
        for root, current in self._rounds.items():
            for rank in [rank for rank, end in current.missing.items() if now >= end]:
                self._pass_over(rank, root, current, now)
            if current.reports_to is None:
                if not current.complete and (
                    current.total.size >= self._size or now - current.begin >= longest(self._size)
                ):
                    self._complete(root, current, now)
            elif current.unsent.size:
                self._send(current.reports_to, Kind.REPORT, root, current.number, current.unsent)
                current.unsent = Summary()
        out, self._out = self._out, []
        return out

    def _on_wish(self, source: int, root: int, now: float) -> None:
        known = self.result(root, now)
        if known is not None:
            if source != self._rank:
                self._send(source, Kind.RESULT, root, 0, known)
            return
        self._asking.setdefault(root, set()).add(source)
        if root == self._rank:
            current = self._rounds.get(root)
            if current is None or current.complete:
                self._begin(root, current.number + 1 if current else 1, None, now)
        elif now - self._asked.get(root, float("-inf")) >= longest(self._size):  # else it is on its way
            self._asked[root] = now
            self._send(Tree(root, self._size).above(self._rank), Kind.WISH, root)

    def _on_query(self, source: int, root: int, number: int, now: float) -> None:
        current = self._rounds.get(root)
        if current is None or current.number < number:
            self._begin(root, number, source, now)
        elif current.number == number:  # ``source`` has taken over from a rank that does not report
            current.reports_to, current.unsent = source, current.total

    def _begin(self, root: int, number: int, reports_to: int | None, now: float) -> None:
        own = Summary.of(self._rank, *self._own_state())
        self._rounds[root] = current = _Round(number, now, reports_to, own, own)
        self._query(Tree(root, self._size).below(self._rank), root, current, now)

    def _query(self, ranks: list[int], root: int, current: _Round, now: float) -> None:
        for rank in ranks:
            current.missing[rank] = now + ANSWER_TIME
            self._send(rank, Kind.QUERY, root, current.number)

    def _on_report(self, source: int, root: int, number: int, summary: Summary) -> None:
        current = self._rounds.get(root)
        if current is None or current.number != number or source in current.silent:
            return
        current.missing.pop(source, None)
        current.total += summary
        current.unsent += summary

    def _pass_over(self, rank: int, root: int, current: _Round, now: float) -> None:
        """Note that a rank does not report, and query the ranks below it."""
        del current.missing[rank]
        current.silent.add(rank)
        current.total += Summary.of(rank, State.SILENT)
        current.unsent += Summary.of(rank, State.SILENT)
        self._query(Tree(root, self._size).below(rank), root, current, now)

    def _complete(self, root: int, current: _Round, now: float) -> None:
        current.complete = True
        unknown = self._size - current.total.size
        self._publish(root, current.total + Summary({State.SILENT: unknown} if unknown else {}), now)

    def _publish(self, root: int, summary: Summary, now: float) -> None:
        """Keep a result, and send it to the ranks that have asked for it."""
        self._results[root] = now, summary
        self._asked.pop(root, None)
        for rank in self._asking.pop(root, set()) - {self._rank}:
            self._send(rank, Kind.RESULT, root, 0, summary)

    def _send(self, receiver: int, kind: Kind, root: int, number: int = 0, summary: Summary = Summary()) -> None:
        self._out.append((receiver, Message(kind, root, number, summary)))


def roots(size: int) -> Iterator[int]:
    """Yield the ranks that are tried as roots."""
    yield from range(min(ROOTS, size))
