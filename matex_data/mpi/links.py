"""TCP connections between the ranks: the system closes those of a rank that dies, which its neighbours notice at once.

The ranks form a binary tree, so that each has three connections at most. A rank that ends in order says so before. What
a rank notices goes on to all others along the tree. MPI alone may not notice: with Open MPI under ``srun`` the others
would wait for a rank that was killed until their time is over.
"""

from __future__ import annotations

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
"""Seconds in which a neighbour has to answer at one of its addresses."""
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
        """Accept connections and messages of neighbours; return after this time, or once there was one."""
        if self._called is not None:
            self._call()
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._wake:
                with suppress(OSError):
                    self._wake.recv(4096)
            else:
                self._read(key.fileobj)  # type: ignore[arg-type]

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
        for each in (self._listener, self._wake, self._waker, *self._neighbours):
            each.close()
        self._neighbours.clear()

    def _call(self) -> None:
        """Try to reach the rank above at each of its addresses."""
        assert self._called is not None
        token, hosts = self._called
        for host in hosts:
            with suppress(OSError):
                connection = socket.create_connection(host, ATTEMPT_TIME)
                try:
                    connection.sendall(_HELLO.pack(token, self.rank))
                    if connection.recv(1) == _WELCOME:
                        self._called = None
                        self._add(connection, above(self.rank))
                        return
                except BaseException:
                    connection.close()
                    raise
                connection.close()
        if time.monotonic() > self._give_up:
            self._called = None
            log.warning(
                "rank %d cannot be reached by TCP from rank %d (%s): if a rank is killed, others may notice only after "
                "MATEX_TIMEOUT",
                *(above(self.rank), self.rank, ", ".join(host for host, _ in hosts)),
            )

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            connection.settimeout(ATTEMPT_TIME)
            hello = b""
            with suppress(OSError):
                while len(hello) < _HELLO.size and (part := connection.recv(_HELLO.size - len(hello))):
                    hello += part
            if len(hello) == _HELLO.size:
                token, rank = _HELLO.unpack(hello)
                if hmac.compare_digest(token, self._token) and rank in below(self.rank, self.size):
                    connection.sendall(_WELCOME)
                    self._add(connection, rank)
                    return
            connection.close()

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
