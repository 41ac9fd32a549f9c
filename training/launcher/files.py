"""Registry of the files and folders that all ranks create at the same call site, though one rank is enough."""

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
"""Call site: digest of the call stack, and the number of times that the program has been there."""
OLD = 600.0
"""Seconds before the start of this job from which a folder is older, however much clocks of file systems differ."""
_START = time.time()
_STDLIB = str(Path(os.__file__).parent)
_LIBRARIES = (str(Path(_STDLIB, "site-packages")), str(Path(_STDLIB, "dist-packages")))
_YES, _NO, _PENDING = b"yes", b"no", b"pending"


class SaveOutcome(NamedTuple):
    """Outcome of a save on rank 0.

    Attributes
    ----------
    path : absolute path of the file or folder.
    error : pickled error, if the save failed.
    result : return value of the function that saved.
    state : state of the saving object afterwards, such as a checkpoint counter.
    """

    path: str
    error: bytes | None = None
    result: Any = None
    state: Any = None


class SaveRegistry:
    """Registry of the saves and new folders of this rank, by call site, which other ranks query. *Collective*.

    With it, a rank finds out whether another has done the same at the same call site, without waiting for ranks that
    never reach it.

    Parameters
    ----------
    channel : ranks of the job.
    """

    def __init__(self, channel: Channel) -> None:
        self.rank, self.size = channel.rank, channel.size
        self.liveness = channel.host.liveness
        self.job_id = channel.host.allgather_object(secrets.token_hex(4))[0]
        self._passed: Counter[bytes] = Counter()
        self._saves: dict[CallSite, SaveOutcome] = {}
        self._read_at: dict[str, CallSite] = {}  # by path: save of rank 0 that this rank may read
        self._begun: set[CallSite] = set()  # saves that may have replaced their files
        self._awaiting = False  # this rank waits for a save of rank 0
        self._made: set[CallSite] = set()
        self._making: set[CallSite] = set()
        if self.liveness is not None:
            self.liveness.on_query = self._answer

    def call_site(self, label: str = "") -> CallSite:
        """Return the current call site, and count it as passed."""
        digest = stack_digest(label)
        self._passed[digest] += 1
        return digest, self._passed[digest]

    def record_save(self, call_site: CallSite, saved: SaveOutcome) -> None:
        """Record the outcome of a save, for queries of other ranks."""
        self._saves[call_site] = saved

    def wait_for_root(self, call: str, path: str) -> SaveOutcome:
        """Wait for the save of rank 0 at this call site, and return its outcome.

        Parameters
        ----------
        call : name of the function that saves, for error messages.
        path : absolute path on this rank.

        Raises
        ------
        PartitionError : rank 0 does not reach this call site in time.
        """
        found: list[SaveOutcome] = []
        self._awaiting = True  # set before the call site counts as passed
        call_site = self.call_site()
        query = pickle.dumps(("save", call_site))

        def is_saved(seconds: float) -> bool:
            end = time.monotonic() + seconds
            while not found:
                assert self.liveness is not None
                reply = self.liveness.query([0], query).get(0, b"")
                if reply:
                    found.append(pickle.loads(reply))
                elif time.monotonic() >= end:
                    return False
            return True

        try:
            with deadlines.collective(
                f"{call} of {path!r}, which rank 0 writes for all ranks (or rank 0 alone calls it)"
            ):
                deadlines.wait_until(is_saved, self.liveness)
        finally:
            self._awaiting = False
        self._read_at[found[0].path] = call_site
        return found[0]

    def check_read(self, path: str) -> None:
        """Check that a file that this rank has just read is still the one of its latest save.

        Raises
        ------
        PartitionError : rank 0 has begun the next save and may have replaced the file.
        """
        digest, count = self._read_at.get(path, (b"", 0))
        if count and self._query_root("begun", (digest, count + 1)) == _YES:
            raise PartitionError(
                f"rank 0 may have replaced {path!r} while this rank read it",
                expected="a read that ends before rank 0 begins its next save",
                found=f"this rank is at {deadlines.user_location()}",
                remedy="synchronize the ranks before the next save, by a training step or by "
                "matex_data.training.allreduce([0.0])",
            )

    def wait_for_readers(self, call_site: CallSite) -> None:
        """Wait until no other rank may still read the file of the previous save at this call site.

        Ranks that have never saved here, that wait for this rank, or that have left the program are not waited for.
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
        """Return the outcome that rank 0 has recorded at this call site; None if it has not been there."""
        reply = self._query_root("save", call_site)
        saved: SaveOutcome | None = pickle.loads(reply) if reply else None
        return saved

    def _query_root(self, about: str, call_site: CallSite) -> bytes:
        """Return the reply of rank 0; empty if it cannot be queried."""
        wait = deadlines.Wait(self.liveness)
        while self.liveness is not None and not self.liveness.ended:
            replies = self.liveness.query([0], pickle.dumps((about, call_site)))
            if replies:
                return replies[0]
            error = wait.check()
            if error is not None:
                raise error
        return b""

    def make_folder(self, path: str, mkdir: Callable[[], None]) -> None:
        """Create a folder; ignore ``FileExistsError`` if another rank has created it at the same call site.

        Parameters
        ----------
        path : absolute path.
        mkdir : function that creates the folder.

        Raises
        ------
        FileExistsError : the folder is older, or was created at another call site or by another program.
        """
        digest = stack_digest(path)
        call_site = digest, self._passed[digest] + 1
        self._making.add(call_site)
        try:
            mkdir()
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
        query, ranks = pickle.dumps(("folder", call_site)), [rank for rank in range(self.size) if rank != self.rank]
        end = time.monotonic() + deadlines.timeout()
        while ranks and self.liveness is not None and not self.liveness.ended:
            replies = self.liveness.query(ranks, query)
            if _YES in replies.values():
                return True
            ranks = [rank for rank in ranks if replies.get(rank, _PENDING) == _PENDING]
            if ranks and time.monotonic() >= end:
                raise PartitionError(
                    f"rank {ranks[0]} does not reply whether it has created the existing folder {path!r}",
                    expected=f"a reply within {deadlines.timeout():g} s",
                    remedy="set MATEX_TIMEOUT to more seconds, if a rank may be busy for that long",
                )
        return False

    def _answer(self, query: bytes) -> bytes:
        """Reply to a query of another rank; runs in the liveness thread."""
        about, call_site = pickle.loads(query)
        if about == "save":
            saved = self._saves.get(call_site)
            return b"" if saved is None else pickle.dumps(saved)
        if about == "passed":
            return pickle.dumps((self._passed[call_site[0]], self._awaiting))
        if about == "begun":
            return _YES if call_site in self._begun else _NO
        if call_site in self._making:  # tested first, since a call site is added to _made before it leaves _making
            return _PENDING
        return _YES if call_site in self._made else _NO


def stack_digest(label: str) -> bytes:
    """Return a digest of the call stack, equal on all ranks.

    It has the frames of the script and its libraries. Frames of the standard library are excluded, since their
    branches depend on the state of the file system.
    """
    digest = hashlib.blake2b(label.encode(), digest_size=12)
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
    """Return the seconds between the last change of a folder and the start of this job."""
    try:
        return _START - Path(path).stat().st_ctime
    except OSError:
        return 0.0


_thread = threading.local()


@contextlib.contextmanager
def _may_exist() -> Iterator[None]:
    """Context manager: an existing folder is no error for the caller, so query no rank."""
    before = getattr(_thread, "may_exist", False)
    _thread.may_exist = True
    try:
        yield
    finally:
        _thread.may_exist = before


def patch_folders(registry: SaveRegistry) -> None:
    """Patch ``os.mkdir`` and its callers: all ranks may create a new folder at the same call site."""
    mkdir, makedirs, path_mkdir = os.mkdir, os.makedirs, pathlib.Path.mkdir

    @functools.wraps(mkdir)
    def make_folder(path: Any, *args: Any, **kwargs: Any) -> None:
        if is_child_process() or getattr(_thread, "may_exist", False) or "dir_fd" in kwargs:
            mkdir(path, *args, **kwargs)
        else:
            registry.make_folder(str(Path(os.fsdecode(path)).absolute()), lambda: mkdir(path, *args, **kwargs))

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


def patch_caches(registry: SaveRegistry) -> None:
    """Patch ``tf.data.Dataset.cache``: ranks do not write to the same cache file."""
    original = tf.data.Dataset.cache

    @functools.wraps(original)
    def cache(dataset: Any, filename: Any = "", name: Any = None) -> Any:
        if isinstance(filename, str | os.PathLike) and os.fspath(filename):
            filename = _cache_file(registry, dataset, os.fspath(filename))
        return original(dataset, filename, name)

    tf.data.Dataset.cache = cache


def _cache_file(registry: SaveRegistry, dataset: Any, filename: str) -> str:
    """Return the cache file of this rank.

    Rank 0 writes the file of the script, which all ranks read once it is complete, also in later jobs. Until then the
    other ranks write files that are removed at the end of the job. Of a sharded dataset each rank keeps a file.
    """
    if is_sharded(dataset):
        return f"{filename}.rank{registry.rank}of{registry.size}"
    if registry.rank == 0 or Path(f"{filename}.index").exists():
        return filename
    own = f"{filename}.{registry.job_id}-rank{registry.rank}"
    atexit.register(_remove, own)
    return own


def _remove(prefix: str) -> None:
    for path in Path(prefix).parent.glob(f"{glob.escape(Path(prefix).name)}*"):
        path.unlink(missing_ok=True)


def failed_save(path: str, error: Exception) -> SaveOutcome:
    """Return the outcome of a failed save."""
    return SaveOutcome(path, pickle_error(error))
