"""TCP connections between the ranks: the system closes those of a rank that dies, which its neighbours notice at once.

The ranks form a binary tree, so that each has three connections at most. A rank that ends in order says so before. What
a rank notices goes on to all others along the tree. MPI alone may not notice: with Open MPI under ``srun`` the others
would wait for a rank that was killed until their time is over.
"""

from __future__ import annotations

import errno
import hmac
import logging
import os
import pickle
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from matex_data.mpi.library import MPI

log = logging.getLogger("matex_data")

ATTEMPT_TIME = 1.0
"""Seconds in which a neighbour has to answer at one of its addresses, and a caller to show its token."""
ATTEMPT_INTERVAL = 0.05
"""Seconds from the begin of an attempt to call to the next one, at least."""
MOST_STRANGERS = 16
"""Connections of callers that have not shown a token; the oldest is dropped for another one."""
CONNECT_TIME = 30.0
"""Seconds after which a rank gives up to reach its neighbour."""
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}
"""Options of the connections: a machine that has lost its power, or its network, shows after 90 seconds."""
ADDRESS_TAG = 9  # of MPI, of the message with the addresses of a rank
_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"<{_TOKEN_BYTES}sI")  # token of the one that is called, rank of the caller
_RECORD = struct.Struct("<cI")  # kind, rank
_WELCOME, _GOODBYE, _DIED, _ENDS = b"W", b"G", b"D", b"E"

OnDeath = Callable[[int, bool], None]
"""Function of the rank that has died, and whether this rank is the first one to tell it."""


def above(rank: int) -> int:
    """Return the rank above one that is not 0."""
    return (rank - 1) // 2


def below(rank: int, size: int) -> list[int]:
    """Return the ranks right below a rank.

    Examples
    --------
    >>> below(0, 4), below(1, 4), below(2, 4)
    ([1, 2], [3], [])
    """
    return [child for child in (2 * rank + 1, 2 * rank + 2) if child < size]


class Links:
    """Connections of a rank to its neighbours in the tree. *Collective*: the ranks exchange addresses.

    Parameters
    ----------
    comm : communicator of all ranks, on which nothing else is under way.
    on_death : called in the thread that calls ``serve``, once at most.
    """

    def __init__(self, comm: MPI.Intracomm, on_death: OnDeath) -> None:
        self.rank, self.size = comm.rank, comm.size
        self._on_death = on_death
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._listener = _listener()
        self._wake, self._waker = socket.socketpair()
        self._neighbours: dict[socket.socket, int] = {}
        self._received: dict[socket.socket, bytes] = {}
        self._strangers: dict[socket.socket, tuple[float, bytes]] = {}  # until when, and what they have sent
        self._calling: socket.socket | None = None
        self._attempt_ends = self._next_attempt = 0.0
        self._departed: set[int] = set()
        self._ending = False  # a rank has died, or ends the job
        self._sending = threading.Lock()
        self._selector = selectors.DefaultSelector()
        for each in (self._listener, self._wake):
            each.setblocking(False)
            self._selector.register(each, selectors.EVENT_READ)
        self._called = self._exchange_addresses(comm)
        self._give_up = time.monotonic() + CONNECT_TIME
        _ALL.add(self)

    def _exchange_addresses(self, comm: MPI.Intracomm) -> tuple[bytes, list[tuple[str, int]]] | None:
        """Send token and addresses to the ranks below; return those of the rank above, None on rank 0. *Collective*."""
        port = self._listener.getsockname()[1]
        own = pickle.dumps((self._token, machine(), port, addresses()))
        requests = [comm.Isend([own, MPI.BYTE], child, ADDRESS_TAG) for child in below(self.rank, self.size)]
        called = None
        if self.rank > 0:
            status = MPI.Status()
            comm.Probe(above(self.rank), ADDRESS_TAG, status)
            memory = bytearray(status.Get_count(MPI.BYTE))
            comm.Recv([memory, MPI.BYTE], above(self.rank), ADDRESS_TAG)
            token, its_machine, its_port, hosts = pickle.loads(memory)
            local = [host for host in hosts if _is_loopback(host)] if its_machine == machine() else []
            called = token, [(host, its_port) for host in [*local, *(h for h in hosts if not _is_loopback(h))]]
        for request in requests:
            request.Wait()
        return called

    def serve(self, seconds: float) -> None:
        """Accept connections and messages of neighbours; return after this time, or once there was one.

        It waits for nobody else: what is not from a rank of the job is dropped.
        """
        self._drop_late()
        if self._called is not None and self._calling is None and time.monotonic() > self._next_attempt:
            self._call()
        for key, _ in self._selector.select(seconds):
            connection = key.fileobj
            if connection is self._listener:
                self._accept()
            elif connection is self._wake:
                with suppress(OSError):
                    self._wake.recv(4096)
            elif connection is self._calling:
                self._continue_call(self._calling)
            elif connection in self._strangers:
                self._read_hello(connection)
            elif connection in self._neighbours:  # none that was dropped meanwhile
                self._read(connection)

    def wake(self) -> None:
        """Let ``serve`` return soon."""
        with suppress(OSError):
            self._waker.send(b"x")

    def announce_end(self) -> None:
        """Tell all ranks that this one ends the job, so that none reports its death."""
        self._ending = True
        self._tell(_ENDS, self.rank)

    def close(self) -> None:
        """Say goodbye, and close all connections."""
        self._tell(_GOODBYE, self.rank)
        self._close_all()

    def _close_all(self) -> None:
        _ALL.discard(self)
        self._selector.close()
        calling = [] if self._calling is None else [self._calling]
        for each in (self._listener, self._wake, self._waker, *self._neighbours, *self._strangers, *calling):
            each.close()
        self._neighbours.clear()

    def _call(self) -> None:
        """Begin to call the rank above at the next of its addresses."""
        assert self._called is not None
        _, hosts = self._called
        if time.monotonic() > self._give_up:
            self._called = None
            log.warning(
                "rank %d cannot be reached by TCP from rank %d (%s): if a rank is killed, others may notice only after "
                "MATEX_TIMEOUT",
                *(above(self.rank), self.rank, ", ".join(host for host, _ in hosts)),
            )
            return
        hosts.append(hosts.pop(0))  # the next attempt is at another one
        self._next_attempt = time.monotonic() + ATTEMPT_INTERVAL
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        connection.setblocking(False)
        if connection.connect_ex(hosts[-1]) not in (0, errno.EINPROGRESS):
            connection.close()
            return
        self._calling, self._attempt_ends = connection, time.monotonic() + ATTEMPT_TIME
        self._selector.register(connection, selectors.EVENT_WRITE)

    def _continue_call(self, connection: socket.socket) -> None:
        """Show the token once the connection is there, and then wait to be welcome."""
        assert self._called is not None
        try:
            if self._selector.get_key(connection).events == selectors.EVENT_WRITE:
                connection.sendall(_HELLO.pack(self._called[0], self.rank))
                self._selector.modify(connection, selectors.EVENT_READ)
                return
            welcome = connection.recv(1) == _WELCOME
        except OSError:
            welcome = False
        self._calling = None
        self._selector.unregister(connection)
        if welcome:
            self._called = None
            self._add(connection, above(self.rank))
        else:
            connection.close()

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            if len(self._strangers) >= MOST_STRANGERS:
                self._drop(next(iter(self._strangers)))
            self._strangers[connection] = (time.monotonic() + ATTEMPT_TIME, b"")
            self._selector.register(connection, selectors.EVENT_READ)

    def _read_hello(self, connection: socket.socket) -> None:
        """Read the token of a caller, and drop it unless it is a rank right below this one."""
        end, hello = self._strangers[connection]
        try:
            part = connection.recv(_HELLO.size - len(hello))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        self._strangers[connection] = end, hello + part
        if part and len(hello + part) < _HELLO.size:
            return
        token, rank = _HELLO.unpack(hello + part) if part else (b"", 0)
        if hmac.compare_digest(token, self._token) and rank in below(self.rank, self.size):
            with suppress(OSError):
                connection.send(_WELCOME)
                self._selector.unregister(connection)
                del self._strangers[connection]
                self._add(connection, rank)
                return
        self._drop(connection)

    def _drop(self, stranger: socket.socket) -> None:
        self._selector.unregister(stranger)
        del self._strangers[stranger]
        stranger.close()

    def _drop_late(self) -> None:
        """Drop who has not shown a token in time, and an attempt to call that takes too long."""
        now = time.monotonic()
        for stranger in [stranger for stranger, (end, _) in self._strangers.items() if now > end]:
            self._drop(stranger)
        if self._calling is not None and now > self._attempt_ends:
            self._selector.unregister(self._calling)
            self._calling.close()
            self._calling = None

    def _add(self, connection: socket.socket, rank: int) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        connection.setblocking(False)
        with self._sending:
            self._neighbours[connection] = rank
        self._received[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        rank = self._neighbours[connection]
        try:
            data = connection.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        content = self._received[connection] + data
        whole = len(content) // _RECORD.size * _RECORD.size
        for kind, number in _RECORD.iter_unpack(content[:whole]):
            self._take(kind, number, rank)
        self._received[connection] = content[whole:]
        if not data:
            self._selector.unregister(connection)
            with self._sending:
                del self._neighbours[connection]
            connection.close()
            if rank not in self._departed:
                self._note_death(rank, first=True)

    def _take(self, kind: bytes, number: int, source: int) -> None:
        if kind == _GOODBYE:
            self._departed.add(source)
        elif kind == _DIED:
            self._note_death(number, first=False)
        elif not self._ending:
            self._ending = True
            self._tell(_ENDS, number)

    def _note_death(self, rank: int, first: bool) -> None:
        if not self._ending:
            self._ending = True
            self._tell(_DIED, rank)
            self._on_death(rank, first)

    def _tell(self, kind: bytes, rank: int) -> None:
        with self._sending:
            for connection in self._neighbours:
                with suppress(OSError):
                    connection.send(_RECORD.pack(kind, rank))


def machine() -> str:
    """Return a text that names this machine, as far as its loopback addresses reach."""
    texts = [socket.gethostname()]
    with suppress(OSError):
        texts.append(str(Path("/proc/self/ns/net").readlink()))
    with suppress(OSError):
        texts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    return " ".join(texts)


def addresses() -> list[str]:
    """Return the IPv4 addresses of this machine, first the one that a packet to elsewhere would come from."""
    found = [*_address_of_route(), *_local_addresses()]
    with suppress(OSError):
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    return list(dict.fromkeys([*found, "127.0.0.1"]))


def _address_of_route() -> Iterator[str]:
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # an address for documentation (RFC 5737): nothing is sent
        yield str(probe.getsockname()[0])


def _local_addresses() -> Iterator[str]:
    """Yield the addresses of all interfaces, from Linux's table of routes (``man 5 proc``)."""
    address = ""
    with suppress(OSError):
        for line in Path("/proc/net/fib_trie").read_text().splitlines():
            words = line.split()
            if words[:1] == ["|--"]:
                address = words[1]
            elif words[:3] == ["/32", "host", "LOCAL"]:
                yield address


def _is_loopback(host: str) -> bool:
    return host.startswith("127.")


def _listener() -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("", 0))
    listener.listen(8)
    return listener


_ALL: weakref.WeakSet[Links] = weakref.WeakSet()


def any_open() -> bool:
    """Return whether this process has links."""
    return len(_ALL) > 0


def _close_in_child() -> None:
    """Close the connections of a forked process: the ones of a dead parent would stay open."""
    for links in list(_ALL):
        links._close_all()


os.register_at_fork(after_in_child=_close_in_child)
