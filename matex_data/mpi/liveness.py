"""Thread of each rank that answers the queries of other ranks, whatever the program does meanwhile."""

from __future__ import annotations

import logging
import pickle
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from matex_data.mpi.activity import State, own_state
from matex_data.mpi.census import ANSWER_TIME, Census, Message, Summary, longest, roots
from matex_data.mpi.library import MPI
from matex_data.mpi.links import Links, OnDeath, any_open
from matex_data.mpi.polling import poll

log = logging.getLogger("matex_data")

QUERY_INTERVAL = 0.1
"""Seconds between two looks for messages."""
LOOKS = 8
"""Looks without a message after which none is left: MPICH may find one only at a later look."""
QUIET = 0.3
"""Seconds without a message after which no census is under way."""
MOST_FAILURES = 50
"""Errors of the thread in succession, after which it ends the job."""
_HEADER = struct.Struct("<qB")  # of a query or an answer: number of the query, state
_STATE_QUERY, _STATE_ANSWER, _QUERY, _ANSWER, _CENSUS = 1, 2, 3, 4, 5  # MPI tags; ``on_query`` answers _QUERY
_TEXT = 400  # bytes of an activity or a location, at most


class Liveness:
    """Thread that answers queries of other ranks, and sends queries to them. *Collective*.

    Parameters
    ----------
    comm : communicator of several ranks, for this object alone. MPI has to provide ``MPI_THREAD_MULTIPLE``.
    on_death : called in the thread when the process of a rank has died, if ``comm`` has all ranks of the job.
    on_failure : called in the thread with the reason if it cannot go on, to end the job.

    Attributes
    ----------
    on_query : function that answers a ``query`` of another rank, called in the thread.
    sent : number of messages that this rank has sent.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        on_death: OnDeath = lambda rank, first: None,
        on_failure: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._comm, self._on_failure = comm, on_failure
        self._links = Links(comm, on_death) if comm.size == MPI.COMM_WORLD.size and not any_open() else None
        self.on_query: Callable[[bytes], bytes] = lambda query: b""
        self.sent = 0
        self.rank, self.size = comm.rank, comm.size
        self._number = 0  # of the last query
        self._answers: dict[int, dict[int, Any]] = {}  # by query that waits, and by rank
        self._unsent: list[tuple[MPI.Request, bytes]] = []
        self._sending, self._numbering = threading.Lock(), threading.Lock()
        self._census = Census(self.rank, self.size, _short_state)
        self._counting = threading.Condition()  # guards ``_census``; notified of results
        self._heard: float | None = None  # time of the last message of a census
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="matex-liveness", daemon=True)
        self._thread.start()
        _ALL.add(self)

    @property
    def ended(self) -> bool:
        """Return whether the thread has ended, as at the end of the program."""
        return self._ended.is_set()

    def census(self, over: Callable[[], bool] = lambda: False) -> Summary | None:
        """Return what all ranks do, this one included, as of the last seconds.

        Parameters
        ----------
        over : returns whether the answer is no longer of interest; the result may be None then.
        """
        for root in roots(self.size):
            end = time.monotonic() + longest(self.size) + ANSWER_TIME
            with self._counting:
                self._census.ask(root, time.monotonic())
            while time.monotonic() < end and not self._ended.is_set() and not over():
                with self._counting:
                    found = self._census.result(root, time.monotonic())
                    if found is not None:
                        return found
                    self._counting.wait(QUERY_INTERVAL)
            if time.monotonic() < end:
                return None
        silent = sum((Summary.of(root, State.SILENT) for root in roots(self.size)), Summary())
        return silent + Summary({State.SILENT: self.size - silent.size} if self.size > silent.size else {})

    def states(self, ranks: Sequence[int]) -> dict[int, tuple[State, str]]:
        """Return the state and the activity or location of a few ranks, by rank. ``census`` is for all of them."""
        states: dict[int, tuple[State, str]] = self._query(ranks, _STATE_QUERY, b"")
        return {rank: states.get(rank, (State.SILENT, "")) for rank in ranks}

    def query(self, ranks: Sequence[int], query: bytes) -> dict[int, bytes]:
        """Return the answers of ``on_query`` on other ranks, by rank, without the ranks that do not answer."""
        return self._query(ranks, _QUERY, query)

    def _query(self, ranks: Sequence[int], tag: int, text: bytes) -> dict[int, Any]:
        """Send a query, and return the answers that arrive within ``ANSWER_TIME``, by rank.

        An answer carries the number of its query, and belongs to that one alone: a late one is dropped.
        """
        answers: dict[int, Any] = {}
        with self._numbering:
            self._number += 1
            number = self._number
        self._answers[number] = answers
        for rank in ranks:
            self._send(rank, tag, _HEADER.pack(number, 0) + text)
        end = time.monotonic() + ANSWER_TIME
        while len(answers) < len(ranks) and time.monotonic() < end and not self._ended.is_set():
            time.sleep(0.01)
        self._answers.pop(number)
        return dict(answers)

    def close(self) -> None:
        """End the thread and free the communicator. *Collective*."""
        for _ in range(2):  # no rank asks after the first barrier, and no message is under way after the second
            barrier = self._comm.Ibarrier()
            poll(lambda barrier=barrier: bool(barrier.Test()))  # type: ignore[misc]
            poll(self._quiet, ANSWER_TIME)
            poll(self._all_sent, ANSWER_TIME)  # MPI reads the texts until then
        self.stop()
        self._comm.Free()

    def _quiet(self) -> bool:
        return self._heard is None or time.monotonic() - self._heard > QUIET

    def stop(self) -> None:
        """End the thread."""
        _ALL.discard(self)
        self._ended.set()
        if self._links is None:
            self._thread.join(ANSWER_TIME)
            return
        self._links.wake()
        self._thread.join(ANSWER_TIME)
        if not self._thread.is_alive():
            self._links.close()

    def leave(self) -> MPI.Request:
        """Return a request that completes when all ranks have reached the end of their programs. *Collective*."""
        return self._comm.Ibarrier()

    def announce_end(self) -> None:
        """Tell the other ranks that this one is about to end the job, so that none reports its death."""
        if self._links is not None and not self._ended.is_set():
            self._links.announce_end()

    def _pause(self) -> None:
        """Wait until the next look for messages, in which neighbours may die."""
        if self._links is None:
            self._ended.wait(QUERY_INTERVAL)
        else:
            end = time.monotonic() + QUERY_INTERVAL
            while not self._ended.is_set() and (left := end - time.monotonic()) > 0:
                self._links.serve(left)

    def _serve(self) -> None:
        """Answer until the end. An error is said once; one that stays ends the job: nobody would hear of this rank."""
        failures, said = 0, set[str]()
        while not self._ended.is_set() and not MPI.Is_finalized():
            try:
                self._pause()
                self._answer()
                failures = 0
            except Exception as error:
                if self._ended.is_set() or MPI.Is_finalized():
                    return
                failures += 1
                text = f"the thread of rank {self.rank} that answers other ranks fails: {type(error).__name__}: {error}"
                if text not in said:
                    said.add(text)
                    log.error("%s; it goes on", text, exc_info=error)
                if failures >= MOST_FAILURES:
                    self._on_failure(f"rank {self.rank} of {self.size} ends the job: {text}")
                    return
                self._ended.wait(QUERY_INTERVAL)

    def _answer(self) -> None:
        """Answer what has arrived, and go on with the censuses."""
        self._receive_all()
        with self._counting:
            sent = self._census.tick(time.monotonic())
            self._counting.notify_all()
        for rank, message in sent:
            self._send(rank, _CENSUS, pickle.dumps(tuple(message)))

    def _receive_all(self) -> None:
        """Receive all messages that have arrived; at most for ``QUERY_INTERVAL`` seconds."""
        status, misses, end = MPI.Status(), 0, time.monotonic() + QUERY_INTERVAL
        while misses < LOOKS and time.monotonic() < end and not self._ended.is_set():
            message = self._comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
            if message is None:
                misses += 1
                continue
            misses = 0
            memory = bytearray(status.Get_count(MPI.BYTE))
            message.Recv([memory, MPI.BYTE], status)
            self._take(status.Get_source(), status.Get_tag(), bytes(memory))

    def _take(self, source: int, tag: int, content: bytes) -> None:
        if tag == _CENSUS:
            self._heard = time.monotonic()
            with self._counting:
                self._census.receive(source, Message(*pickle.loads(content)), self._heard)
            return
        number, state = _HEADER.unpack_from(content)
        text = content[_HEADER.size :]
        if tag == _STATE_QUERY:
            own, location = _short_state()
            self._send(source, _STATE_ANSWER, _HEADER.pack(number, own) + location.encode())
        elif tag == _QUERY:
            self._send(source, _ANSWER, _HEADER.pack(number, 0) + self.on_query(text))
        else:
            answer = (State(state), text.decode(errors="replace")) if tag == _STATE_ANSWER else text
            self._answers.get(number, {})[source] = answer

    def _send(self, rank: int, tag: int, text: bytes) -> None:
        self._all_sent()
        with self._sending:
            self._unsent.append((self._comm.Isend([text, MPI.BYTE], rank, tag), text))
            self.sent += 1

    def _all_sent(self) -> bool:
        """Release the texts that MPI has sent, and return whether none is left."""
        with self._sending:
            self._unsent = [(request, text) for request, text in self._unsent if not request.Test()]
            return not self._unsent


def _short_state() -> tuple[State, str]:
    state, text = own_state()
    return state, text.encode()[-_TEXT:].decode(errors="replace")


_ALL: weakref.WeakSet[Liveness] = weakref.WeakSet()


def all_threads() -> list[Liveness]:
    """Return the liveness threads of this process that run."""
    return list(_ALL)


def stop_threads() -> None:
    """End the liveness threads of this process, before MPI ends."""
    for liveness in all_threads():
        liveness.stop()
