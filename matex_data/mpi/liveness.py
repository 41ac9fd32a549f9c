"""Thread that tells the other ranks whether this one runs, waits, is busy or has left, and notices their death.

It holds TCP connections to its neighbours in a tree of the ranks (``census.Tree``). The system
closes those of a rank that dies, so that its neighbours notice it at once; MPI alone may not notice: with Open MPI
under ``srun`` the others would wait for a rank that was killed until their time is over. A rank that ends in order says
so before. Callers that do not know the token of a rank are dropped.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import pickle
import secrets
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from matex_data.mpi.activity import RankState, meetings, own_state
from matex_data.mpi.addresses import addresses, machine, reachable
from matex_data.mpi.census import ANSWER_TIME, FAN_OUT, Census, RankStates, Tree
from matex_data.mpi.library import MPI
from matex_data.mpi.polling import poll

log = logging.getLogger("matex_data")

ATTEMPT_TIME = 1.0
"""Seconds in which a neighbour has to answer at one of its addresses, and a caller to show its token."""
ATTEMPT_INTERVAL = 0.05
"""Seconds from an attempt to call to the next one."""
CONNECT_TIME = 30.0
"""Seconds after which a rank gives up to reach its neighbour."""
MOST_STRANGERS = 2 * FAN_OUT
"""Connections of callers that have not shown a token, at most: all ranks below call at once, and then some strangers.

The oldest is dropped for another one.
"""
MOST_UNSENT = 100
"""Messages that are kept for a neighbour until it is connected."""
TICK = 0.2
"""Seconds between two looks for answers of censuses that are late."""
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}
"""Options of the connections: a machine that has lost its power, or its network, shows after 90 seconds."""
ADDRESS_TAG = 9  # of MPI, of the message with the addresses of a rank
_TEXT = 400  # bytes of an activity or a location, at most
_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"<{_TOKEN_BYTES}sI")  # token of the one that is called, rank of the caller
_WELCOME, _COMING, _CONNECTED = b"W", b"C", b"M"
_LENGTH = struct.Struct("<I")  # of a message

OnDeath = Callable[[int, bool], None]
"""Function of the rank that has died, and whether this rank is the first one to tell it."""


class Liveness:
    """Thread that tells other ranks what this one does, and asks them. *Collective*: the ranks exchange addresses.

    Parameters
    ----------
    comm : communicator of several ranks, for this object alone, on which nothing else is under way. MPI is called to
        make this object, to ``close`` and to ``leave``, and not by its thread.
    on_death : called in the thread, once at most, when the process of a rank has died; None: another object tells it.
    on_failure : called in the thread with the reason if it cannot go on, to end the job.
    on_end : called in the thread, once at most, when a rank is about to end the job.

    Attributes
    ----------
    on_query : function that answers a ``query`` of another rank, called in the thread.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        on_death: OnDeath | None = None,
        on_failure: Callable[[str], None] = lambda reason: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.size = comm.rank, comm.size
        self.on_query: Callable[[bytes], bytes] = lambda query: b""
        self._comm, self._on_death, self._on_failure, self._on_end = comm, on_death, on_failure, on_end
        self._tree = Tree(self.size)
        self._changed = threading.Condition()  # guards those that follow; notified of results and of answers
        self._census = Census(self.rank, self.size, lambda: (*_short_state(), meetings(self)))
        self._answers: dict[int, dict[int, Any]] = {}  # by query that waits, and by rank
        self._number = 0  # of the last query
        self._ended = threading.Event()
        self._neighbours: dict[int, asyncio.StreamWriter] = {}  # this and all that follow: of the thread
        self._unsent: dict[int, deque[tuple[Any, ...]]] = {  # by neighbour that is not yet connected
            neighbour: deque(maxlen=MOST_UNSENT) for neighbour in self._tree.neighbours(self.rank)
        }
        self._departed: set[int] = set()
        self._ending = False  # a rank has died, or ends the job
        self._said: set[str] = set()
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._listener = socket.create_server(("", 0), backlog=128)
        self._listener.setblocking(False)
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet([self._listener])
        above = self._exchange_addresses()
        self._loop = asyncio.SelectorEventLoop()
        self._tasks = [self._loop.create_task(loop) for loop in (self._accept(), self._tick_on(), self._call(above))]
        self._thread = threading.Thread(target=self._run, name="matex-liveness", daemon=True)
        self._thread.start()
        _ALL.add(self)

    @property
    def ended(self) -> bool:
        """Return whether the thread has ended, as at the end of the program."""
        return self._ended.is_set()

    def census(self, over: Callable[[], bool] = lambda: False) -> RankStates | None:
        """Return what all ranks do, this one included, as of the last seconds.

        Parameters
        ----------
        over : returns whether the answer is no longer of interest; the result may be None then.
        """
        begin = time.monotonic()
        with self._changed:
            self._census.ask(self.rank, begin)
        self._in_thread(self._tick)
        while not self.ended and not over():
            with self._changed:
                found = self._census.result(begin)
                if found is not None:
                    return found
                self._changed.wait(TICK)
        return None

    def states(self, ranks: Sequence[int]) -> dict[int, tuple[RankState, str]]:
        """Return the state and the activity or location of a few ranks, by rank. ``census`` is for all of them."""
        states: dict[int, tuple[RankState, str]] = self._query(ranks, None)
        return {rank: states.get(rank, (RankState.SILENT, "")) for rank in ranks}

    def query(self, ranks: Sequence[int], query: bytes) -> dict[int, bytes]:
        """Return the answers of ``on_query`` on other ranks, by rank, without the ranks that do not answer."""
        return self._query(ranks, query)

    def _query(self, ranks: Sequence[int], query: bytes | None) -> dict[int, Any]:
        """Send a query, and return the answers that arrive within ``ANSWER_TIME``, by rank.

        An answer carries the number of its query, and belongs to that one alone: a late one is dropped.
        """
        answers: dict[int, Any] = {}
        with self._changed:
            self._number += 1
            number = self._number
            self._answers[number] = answers
        for rank in ranks:
            self._in_thread(self._route, rank, "query", self.rank, number, query)
        with self._changed:
            self._changed.wait_for(lambda: len(answers) == len(ranks) or self.ended, ANSWER_TIME)
            del self._answers[number]
            return dict(answers)

    def close(self) -> None:
        """End the thread and free the communicator. *Collective*."""
        barrier = self._comm.Ibarrier()
        poll(lambda: bool(barrier.Test()))
        self.stop()
        self._comm.Free()

    def stop(self) -> None:
        """Say goodbye, and end the thread."""
        _ALL.discard(self)
        if not self.ended:
            self._ended.set()
            self._in_thread(self._loop.stop)
            self._thread.join(ANSWER_TIME)

    def leave(self) -> MPI.Request:
        """Return a request that completes when all ranks have reached the end of their programs. *Collective*."""
        return self._comm.Ibarrier()

    def announce_end(self) -> None:
        """Tell the other ranks that this one is about to end the job, so that none reports its death."""
        self._in_thread(self._end, self.rank)

    def _in_thread(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function soon in the thread, unless that has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def _run(self) -> None:
        """Serve until the end. A rank whose thread fails ends the job: nobody would hear of it any more."""
        try:
            self._loop.run_forever()
        except Exception as error:
            if not self.ended:
                self._on_failure(f"rank {self.rank} of {self.size} ends the job: its liveness thread fails: {error!r}")
        finally:
            with suppress(Exception):
                self._leave()
            self._close_sockets()
            with suppress(RuntimeError):
                self._loop.close()

    def _leave(self) -> None:
        """Say goodbye, and end all tasks: between two rounds of the loop, so that none goes on in between.

        Within a round a task may connect another neighbour, or the loop accept a caller whom nobody waits for any more.
        """
        for connection in self._neighbours.values() if self.ended else ():
            _send(connection, "goodbye")
            connection.close()
        while tasks := asyncio.all_tasks(self._loop):
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    def _close_sockets(self) -> None:
        for connection in list(self._sockets):
            connection.close()

    async def _tick_on(self) -> None:
        while True:
            try:
                self._tick()
            except Exception as error:
                self._say(error)
            await asyncio.sleep(TICK)

    def _tick(self) -> None:
        """Go on with the censuses."""
        with self._changed:
            sent = self._census.tick(time.monotonic())
            self._changed.notify_all()
        for rank, answer in sent:
            self._send(rank, "census", answer)

    def _send(self, neighbour: int, *message: Any) -> None:
        if neighbour in self._neighbours:
            _send(self._neighbours[neighbour], *message)
        elif neighbour in self._unsent:
            self._unsent[neighbour].append(message)

    def _tell_all(self, kind: str, rank: int) -> None:
        for connection in self._neighbours.values():
            _send(connection, kind, rank)

    def _route(self, destination: int, *message: Any) -> None:
        """Send a message to any rank by way of those between, or take it in."""
        if destination == self.rank:
            self._take(self.rank, *message)
        else:
            self._send(self._tree.towards(self.rank, destination), "route", destination, *message)

    def take(self, neighbour: int, content: bytes) -> None:
        """Take in a message of a neighbour. An error is said once: the other ranks still need this one."""
        try:
            self._take(neighbour, *pickle.loads(content))
        except Exception as error:
            self._say(error)

    def _say(self, error: Exception) -> None:
        text = f"the thread of rank {self.rank} that answers other ranks fails: {type(error).__name__}: {error}"
        if text not in self._said:
            self._said.add(text)
            log.error("%s; it goes on", text, exc_info=error)

    def _take(self, neighbour: int, kind: str, *content: Any) -> None:
        if kind == "census":
            (answer,) = content
            with self._changed:
                if answer is None:
                    self._census.ask(neighbour, time.monotonic())
                else:
                    self._census.receive(neighbour, answer, time.monotonic())
            self._tick()
        elif kind == "route":
            self._route(*content)
        elif kind == "query":
            source, number, query = content
            self._route(source, "answer", self.rank, number, _short_state() if query is None else self.on_query(query))
        elif kind == "answer":
            source, number, answer = content
            with self._changed:
                self._answers.get(number, {})[source] = answer
                self._changed.notify_all()
        elif kind == "goodbye":
            self._departed.add(neighbour)
        elif kind == "died":
            self._note_death(int(content[0]), first=False)
        else:
            self._end(*content)

    def _end(self, rank: int) -> None:
        """Note that a rank ends the job, and tell it on."""
        if not self._ending:
            self._ending = True
            self._tell_all("ends", rank)
            self._on_end()

    def _note_death(self, rank: int, first: bool) -> None:
        if not self._ending:
            self._ending = True
            self._tell_all("died", rank)
            if self._on_death is not None:
                self._on_death(rank, first)

    def lost(self, neighbour: int) -> None:
        """Note that the connection to a neighbour is closed."""
        connection = self._neighbours.pop(neighbour, None)
        if connection is not None:
            connection.close()
        if neighbour not in self._departed and not self.ended:
            self._note_death(neighbour, first=True)

    def _exchange_addresses(self) -> tuple[bytes, list[tuple[str, int]]] | None:
        """Send token and addresses to the ranks below; return those of the rank above, None on rank 0. *Collective*."""
        own = pickle.dumps((self._token, machine(), self._listener.getsockname()[1], addresses()))
        below = self._tree.below(self.rank)
        requests = [self._comm.Isend([own, MPI.BYTE], child, ADDRESS_TAG) for child in below]
        called = None
        if self.rank > 0:
            above, status = self._tree.above(self.rank), MPI.Status()
            self._comm.Probe(above, ADDRESS_TAG, status)
            memory = bytearray(status.Get_count(MPI.BYTE))
            self._comm.Recv([memory, MPI.BYTE], above, ADDRESS_TAG)
            token, its_machine, port, hosts = pickle.loads(memory)
            called = token, [(host, port) for host in reachable(hosts, its_machine == machine())]
        for request in requests:
            request.Wait()
        return called

    async def _call(self, called: tuple[bytes, list[tuple[str, int]]] | None) -> None:
        """Connect with the rank above, at the first of its addresses that answers."""
        if called is None:
            return
        (token, hosts), above = called, self._tree.above(self.rank)
        end = time.monotonic() + CONNECT_TIME
        while time.monotonic() < end:
            for host in hosts:
                if await self._attempt(host, token):
                    return
                await asyncio.sleep(ATTEMPT_INTERVAL)
        log.warning(
            "rank %d cannot be reached by TCP from rank %d (%s): if a rank is killed, others may notice only after "
            "MATEX_TIMEOUT",
            *(above, self.rank, ", ".join(host for host, _ in hosts)),
        )

    async def _attempt(self, host: tuple[str, int], token: bytes) -> bool:
        """Return whether the rank above has answered at an address, and is connected.

        Once this rank has said that it is coming, the other one takes the end of the connection for a death: this one
        waits as long as the connection stands, and says so if it leaves meanwhile.
        """
        connection = socket.socket()
        connection.setblocking(False)
        self._sockets.add(connection)
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(ATTEMPT_TIME):
                await self._loop.sock_connect(connection, host)
                await self._loop.sock_sendall(connection, _HELLO.pack(token, self.rank))
                welcome = await self._loop.sock_recv(connection, 1) == _WELCOME
            if welcome:
                await self._loop.sock_sendall(connection, _COMING)
                try:
                    if await self._loop.sock_recv(connection, 1) == _CONNECTED:
                        await self._add(connection, self._tree.above(self.rank))
                        return True
                except asyncio.CancelledError:
                    with suppress(OSError):
                        connection.send(_packed("goodbye"))
                    raise
        connection.close()
        return False

    async def _accept(self) -> None:
        """Accept callers until the end."""
        strangers: list[asyncio.Task[None]] = []
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._listener)
            except OSError as error:  # no descriptor is left
                self._say(error)
                await asyncio.sleep(ATTEMPT_TIME)
                continue
            connection.setblocking(False)
            self._sockets.add(connection)
            strangers = [task for task in strangers if not task.done()]
            if len(strangers) >= MOST_STRANGERS:
                strangers.pop(0).cancel()
            strangers.append(self._loop.create_task(self._greet(connection)))

    async def _greet(self, stranger: socket.socket) -> None:
        """Connect with a caller that is a rank right below this one, and drop any other."""
        rank: int | None = None
        try:
            async with asyncio.timeout(ATTEMPT_TIME):
                rank = await self._introduction(stranger)
        except (OSError, TimeoutError):
            pass
        finally:
            if rank is None:
                stranger.close()
        if rank is not None:  # no stranger any more, who may be dropped for another one
            self._tasks.append(self._loop.create_task(self._add(stranger, rank, _CONNECTED)))

    async def _introduction(self, stranger: socket.socket) -> int | None:
        """Return the rank of a caller that is coming; None if it does not show the token."""
        token, rank = _HELLO.unpack(await self._received(stranger, _HELLO.size))
        if not hmac.compare_digest(token, self._token) or rank not in self._tree.below(self.rank):
            return None
        await self._loop.sock_sendall(stranger, _WELCOME)
        await self._received(stranger, len(_COMING))
        return int(rank)

    async def _received(self, connection: socket.socket, count: int) -> bytes:
        """Return so many bytes of a connection."""
        content = b""
        while len(content) < count:
            part = await self._loop.sock_recv(connection, count - len(content))
            if not part:
                raise ConnectionError("the caller has closed the connection")
            content += part
        return content

    async def _add(self, connection: socket.socket, neighbour: int, greeting: bytes = b"") -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        reader, writer = await asyncio.open_connection(sock=connection)
        writer.write(greeting)
        self._neighbours[neighbour] = writer
        for message in self._unsent.pop(neighbour):
            _send(writer, *message)
        self._tasks.append(self._loop.create_task(self._listen(reader, neighbour)))

    async def _listen(self, reader: asyncio.StreamReader, neighbour: int) -> None:
        """Take in the messages of a neighbour, with their lengths before them, until the connection is closed."""
        try:
            while True:
                (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                self.take(neighbour, await reader.readexactly(size))
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self.lost(neighbour)


def _send(neighbour: asyncio.StreamWriter, *message: Any) -> None:
    neighbour.write(_packed(*message))


def _packed(*message: Any) -> bytes:
    content = pickle.dumps(message)
    return _LENGTH.pack(len(content)) + content


def _short_state() -> tuple[RankState, str]:
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


def _close_in_child() -> None:
    """Close the connections of a forked process: the ones of a dead parent would stay open."""
    for liveness in all_threads():
        liveness._close_sockets()


os.register_at_fork(after_in_child=_close_in_child)
