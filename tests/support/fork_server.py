"""Fork Python programs from a process that has imported TensorFlow: the import takes 5 s of a core, a fork 20 ms.

Processes of tests share one server. In place of a program, ``mpiexec`` starts the client of this module. It passes its
environment, folder, arguments and open files on to the server, forwards signals to the forked process, and ends as that
one does. The client uses the standard library alone, so that it starts at once.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import selectors
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Any

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGABRT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PMI_FD = "PMI_FD"
"""Environment variable with the number of the file through which a rank of MPICH speaks to its launcher."""


def main() -> None:
    """Serve, or act as a client, as the command line says."""
    what, path, *arguments = sys.argv[1:]
    if what == "client":
        _client(path, arguments)
    path, *_ = sys.argv[:] = _Server(path).run()
    from tests.support.program import run

    sys.path[0] = str(Path(path).parent)
    names = globals()
    for name in [name for name in names if not name.startswith("__")]:
        del names[name]
    run(path, names)


def _client(path: str, arguments: list[str]) -> None:
    """Have the program forked, and end as it does."""
    files = [0, 1, 2]
    if PMI_FD in os.environ:
        files.append(int(os.environ[PMI_FD]))
    request = pickle.dumps((arguments, str(Path.cwd()), dict(os.environ)))
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        socket.send_fds(server, [struct.pack("q", len(request))], files)
        server.sendall(request)
        for file in files[3:]:
            os.close(file)  # the launcher sees the end of the program by it
        for number in FORWARDED:
            signal.signal(number, lambda number, frame: server.sendall(bytes([number])))
        status = int.from_bytes(server.recv(4), sys.byteorder)
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


class _Server:
    """Parent of the forked processes, which kills those whose client has ended."""

    def __init__(self, path: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._listening = socket.socket(socket.AF_UNIX)
        self._path = path
        self._running: set[int] = set()

    def run(self) -> list[str]:
        """Fork for each client; return in the forked process, with the arguments of its program.

        The server ends with its standard input.
        """
        import h5py  # noqa: F401
        import keras  # noqa: F401
        import tensorflow  # noqa: F401

        gc.freeze()  # a collection in a forked process would visit, and so copy, all objects of these
        self._listening.bind(self._path)
        self._listening.listen()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is sys.stdin:
                    os._exit(0)
                if key.fileobj is self._listening:
                    arguments = self._fork()
                    if arguments is not None:
                        return arguments
                elif key.data[0] == "client":
                    self._pass_signal(key.fileobj, key.data[1])
                else:
                    self._pass_status(key.fileobj, *key.data[1:])

    def _fork(self) -> list[str] | None:
        """Accept a client. Return None in the server, the arguments in the forked process."""
        client, _ = self._listening.accept()
        head, files, _, _ = socket.recv_fds(client, 8, 4)
        (length,) = struct.unpack("q", head)
        arguments, folder, environ = pickle.loads(_receive(client, length))
        pid = os.fork()
        if pid == 0:
            client.close()
            self._close()
            _become(folder, environ, files)
            return arguments  # type: ignore[no-any-return]
        for file in files:
            os.close(file)
        client_pid, *_ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        note = Path(f"{self._path}.{client_pid}")
        note.write_text(str(pid))
        self._running.add(pid)
        self._selector.register(client, selectors.EVENT_READ, ("client", pid))
        self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, ("process", pid, client, note))
        return None

    def _close(self) -> None:
        """Close all files of the server but its standard input."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, int):
                os.close(key.fileobj)
            elif key.fileobj is not sys.stdin:
                key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _pass_signal(self, client: Any, pid: int) -> None:
        if pid not in self._running:
            return
        numbers = client.recv(1)
        os.kill(pid, numbers[0] if numbers else signal.SIGKILL)
        if not numbers:
            self._selector.unregister(client)

    def _pass_status(self, process: Any, pid: int, client: socket.socket, note: Path) -> None:
        self._running.remove(pid)
        note.unlink(missing_ok=True)  # before the system gives the number to another process
        self._selector.unregister(process)
        os.close(process)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(KeyError):
            self._selector.unregister(client)
        with contextlib.suppress(OSError):
            client.sendall(status.to_bytes(4, sys.byteorder))
        client.close()


def _receive(client: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length and (more := client.recv(length - len(data))):
        data += more
    return bytes(data)


def _become(folder: str, environ: dict[str, str], files: list[int]) -> None:
    """Give this forked process the environment and the files of its client."""
    import numpy as np

    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    added = environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in added if path and path not in sys.path]
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
        os.close(file)
    for file in files[3:]:
        os.environ[PMI_FD] = str(file)
    np.random.seed()  # otherwise all forked processes would draw the same numbers


if __name__ == "__main__":
    main()
