"""Files and folders that every rank of a job makes at the same point of the program, though one is enough."""

from __future__ import annotations

import atexit
import contextlib
import functools
import glob
import hashlib
import os
import pathlib
import pickle
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import tensorflow as tf

from matex_data.errors import PartitionError
from matex_data.mpi import deadlines
from matex_data.mpi.communicator import pickle_error
from matex_data.mpi.processes import is_child_process
from matex_data.training.comm.channel import Channel
from matex_data.training.sharding.rows import is_sharded

CallSite = tuple[bytes, int]
"""Point of a program: digest of the stack of calls, and how many times it was there."""
OLD = 600.0
"""Seconds before the start of this job that make a folder older than the job, however clocks of file systems differ."""
_START = time.time()
_STDLIB = str(Path(os.__file__).parent)
_LIBRARIES = (str(Path(_STDLIB, "site-packages")), str(Path(_STDLIB, "dist-packages")))
_YES, _NO, _PENDING = b"yes", b"no", b"soon"


class SaveOutcome(NamedTuple):
    """Outcome of a save of rank 0.

    Attributes
    ----------
    path : absolute, of the file or folder.
    error : pickled, if the save failed.
    result, state : that it returned, and that the object that saved has from then on.
    """

    path: str
    error: bytes | None = None
    result: Any = None
    state: Any = None


class SaveRegistry:
    """Record of the saves and new folders of this rank, by point of the program, which other ranks consult.

    So a rank can find out that another has done the same at the same point, and no rank needs to wait for one that
    never comes there. Making one is *collective*.
    """

    def __init__(self, channel: Channel) -> None:
        self.rank, self.size = channel.rank, channel.size
        self.liveness = channel.host.liveness
        self.job = channel.host.allgather_object(secrets.token_hex(4))[0]
        self._passed: Counter[bytes] = Counter()
        self._saves: dict[CallSite, SaveOutcome] = {}
        self._read_at: dict[str, CallSite] = {}  # by path: the save of rank 0 that this rank may read
        self._begun: set[CallSite] = set()  # saves that may have changed their files
        self._awaiting = False  # whether this rank waits for a save of rank 0
        self._made: set[CallSite] = set()
        self._making: set[CallSite] = set()
        if self.liveness is not None:
            self.liveness.on_query = self._answer

    def call_site(self, what: str = "") -> CallSite:
        """Return this point of the program, which is passed by that."""
        digest = stack_digest(what)
        self._passed[digest] += 1
        return digest, self._passed[digest]

    def record_save(self, call_site: CallSite, saved: SaveOutcome) -> None:
        """Let other ranks know that this one has saved."""
        self._saves[call_site] = saved

    def wait_for_root(self, call: str, path: str) -> SaveOutcome:
        """Return the outcome of the save of rank 0 at this point of the program, once there is one.

        Raises
        ------
        PartitionError : rank 0 does not come to this point.
        """
        found: list[SaveOutcome] = []
        self._awaiting = True  # before the point counts as passed
        call_site = self.call_site()
        question = pickle.dumps(("save", call_site))

        def is_saved(seconds: float) -> bool:
            end = time.monotonic() + seconds
            while not found:
                assert self.liveness is not None
                reply = self.liveness.query([0], question).get(0, b"")
                if reply:
                    found.append(pickle.loads(reply))
                elif time.monotonic() >= end:
                    return False
            return True

        try:
            with deadlines.collective(f"{call} of {path!r}, which rank 0 carries out for all, or rank 0 alone does"):
                deadlines.wait_until(is_saved, self.liveness)
        finally:
            self._awaiting = False
        self._read_at[found[0].path] = call_site
        return found[0]

    def check_read(self, path: str) -> None:
        """Make sure that what this rank has just read is what it has saved, as far as it has.

        Raises
        ------
        PartitionError : rank 0 is already at the next such save, and may have replaced the file before.
        """
        digest, count = self._read_at.get(path, (b"", 0))
        if count and self._ask_root("begun", (digest, count + 1)) == _YES:
            raise PartitionError(
                f"rank 0 was about to save over {path!r} while this rank read it, so this may be a later state",
                found=f"this rank is at {deadlines.user_location()}",
                remedy="let the ranks meet between this and the next save, as in a step of training or "
                "matex_data.training.allreduce([0.0])",
            )

    def wait_for_readers(self, call_site: CallSite) -> None:
        """Return when no other rank is between the last save at this point and the next, which may replace its file.

        A rank that never comes to such a save is not waited for, nor one that waits for this one or has left.
        """
        _, count = call_site
        ranks = [rank for rank in range(self.size) if rank != self.rank and count > 1]
        end = time.monotonic() + deadlines.timeout()
        while ranks and self.liveness is not None and not self.liveness.ended and time.monotonic() < end:
            replies = self.liveness.query(ranks, pickle.dumps(("passed", call_site)))
            found = {rank: pickle.loads(reply) for rank, reply in replies.items()}
            ranks = [rank for rank in ranks if rank not in found or 0 < found[rank][0] < count]
            if ranks:
                states = self.liveness.states()
                done = (deadlines.State.WAITING, deadlines.State.LEFT)
                ranks = [rank for rank in ranks if states[rank][0] not in done or found.get(rank, (0, True))[1]]
        self._begun.add(call_site)

    def root_save(self, call_site: CallSite) -> SaveOutcome | None:
        """Return what rank 0 has noted at this point, if it has come there."""
        reply = self._ask_root("save", call_site)
        saved: SaveOutcome | None = pickle.loads(reply) if reply else None
        return saved

    def _ask_root(self, about: str, call_site: CallSite) -> bytes:
        """Return the reply of rank 0; empty where it cannot be asked."""
        wait = deadlines.Wait(self.liveness)
        while self.liveness is not None and not self.liveness.ended:
            replies = self.liveness.query([0], pickle.dumps((about, call_site)))
            if replies:
                return replies[0]
            error = wait.check()
            if error is not None:
                raise error
        return b""

    def make_folder(self, path: str, make_folder: Callable[[], None]) -> None:
        """Make a folder; it is no error that another rank has made it at the same point of the program.

        Raises
        ------
        FileExistsError : it is older, or was made at another point, or by another program.
        """
        digest = stack_digest(path)
        call_site = digest, self._passed[digest] + 1
        self._making.add(call_site)
        try:
            make_folder()
            self._made.add(call_site)
            self._passed[digest] += 1
        except FileExistsError:
            self._passed[digest] += 1
            self._making.discard(call_site)
            if _age(path) > OLD or not self._made_by_another_rank(call_site, path):
                raise
        finally:
            self._making.discard(call_site)

    def _made_by_another_rank(self, call_site: CallSite, path: str) -> bool:
        question, ranks = pickle.dumps(("folder", call_site)), [rank for rank in range(self.size) if rank != self.rank]
        end = time.monotonic() + deadlines.timeout()
        while ranks and self.liveness is not None and not self.liveness.ended:
            replies = self.liveness.query(ranks, question)
            if _YES in replies.values():
                return True
            ranks = [rank for rank in ranks if replies.get(rank, _PENDING) == _PENDING]
            if ranks and time.monotonic() >= end:
                raise PartitionError(
                    f"rank {ranks[0]} does not say whether it has made the folder {path!r}, which exists",
                    remedy="where a rank may be busy for that long, set MATEX_TIMEOUT to more seconds",
                )
        return False

    def _answer(self, question: bytes) -> bytes:
        """Reply to another rank; runs in the thread that answers."""
        about, call_site = pickle.loads(question)
        if about == "save":
            saved = self._saves.get(call_site)
            return b"" if saved is None else pickle.dumps(saved)
        if about == "passed":
            return pickle.dumps((self._passed[call_site[0]], self._awaiting))
        if about == "begun":
            return _YES if call_site in self._begun else _NO
        if call_site in self._making:  # looked at first: a point is made before it is no longer in the making
            return _PENDING
        return _YES if call_site in self._made else _NO


def stack_digest(what: str) -> bytes:
    """Return a digest of the calls that lead here, the same on all ranks: of the program and its libraries.

    Frames of the standard library are left out, since how it goes on depends on what it finds in the file system.
    """
    digest = hashlib.blake2b(what.encode(), digest_size=12)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        own = str(frame.f_globals.get("__name__")).split(".")[0] == "matex_data"
        standard = code.co_filename.startswith(("<frozen", _STDLIB)) and not code.co_filename.startswith(_LIBRARIES)
        if not own and not standard:
            digest.update(f"{code.co_name} {frame.f_lineno} {frame.f_lasti};".encode())
        frame = frame.f_back
    return digest.digest()


def _age(path: str) -> float:
    """Return by how many seconds the last change of a folder came before the start of this job."""
    try:
        return _START - Path(path).stat().st_ctime
    except OSError:
        return 0.0


_thread = threading.local()


@contextlib.contextmanager
def _may_exist() -> Iterator[None]:
    """Context manager: the caller does not mind if the folder exists, so no rank is asked."""
    before = getattr(_thread, "yes", False)
    _thread.yes = True
    try:
        yield
    finally:
        _thread.yes = before


def patch_folders(register: SaveRegistry) -> None:
    """Let all ranks make a new folder at the same point of the program, as ``os.mkdir`` and those who call it do."""
    mkdir, makedirs, path_mkdir = os.mkdir, os.makedirs, pathlib.Path.mkdir

    @functools.wraps(mkdir)
    def make_folder(path: Any, *args: Any, **kwargs: Any) -> None:
        if is_child_process() or getattr(_thread, "yes", False) or "dir_fd" in kwargs:
            mkdir(path, *args, **kwargs)
        else:
            register.make_folder(str(Path(os.fsdecode(path)).absolute()), lambda: mkdir(path, *args, **kwargs))

    @functools.wraps(makedirs)
    def make_all(name: Any, mode: int = 0o777, exist_ok: bool = False) -> None:
        with _may_exist() if exist_ok else contextlib.nullcontext():
            makedirs(name, mode, exist_ok)

    @functools.wraps(path_mkdir)
    def make_path(self: Any, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        with _may_exist() if exist_ok else contextlib.nullcontext():
            path_mkdir(self, mode, parents, exist_ok)

    os.mkdir, os.makedirs = make_folder, make_all
    pathlib.Path.mkdir = make_path  # type: ignore[method-assign]


def patch_caches(register: SaveRegistry) -> None:
    """Give each rank a cache file of its own where ``tf.data.Dataset.cache`` writes one."""
    original = tf.data.Dataset.cache

    @functools.wraps(original)
    def cache(dataset: Any, filename: Any = "", name: Any = None) -> Any:
        if isinstance(filename, str | os.PathLike) and os.fspath(filename):
            filename = _cache_file(register, dataset, os.fspath(filename))
        return original(dataset, filename, name)

    tf.data.Dataset.cache = cache


def _cache_file(register: SaveRegistry, dataset: Any, filename: str) -> str:
    """Return the cache file of this rank.

    Rank 0 writes that of the script, which all ranks read once it is whole, in later jobs, too. Until then other ranks
    have files that end with the job. Where a data set is a rank's part, each rank has a file that stays.
    """
    if is_sharded(dataset):
        return f"{filename}.rank{register.rank}of{register.size}"
    if register.rank == 0 or Path(f"{filename}.index").exists():
        return filename
    own = f"{filename}.{register.job}-rank{register.rank}"
    atexit.register(_remove, own)
    return own


def _remove(prefix: str) -> None:
    for path in Path(prefix).parent.glob(f"{glob.escape(Path(prefix).name)}*"):
        path.unlink(missing_ok=True)


def failed_save(path: str, error: Exception) -> SaveOutcome:
    """Return the outcome of a save that has failed."""
    return SaveOutcome(path, pickle_error(error))
