"""Registry of the saves and new folders of this rank, by call site, which other ranks query."""

from __future__ import annotations

import hashlib
import os
import pickle
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from matex_data.errors import PartitionError
from matex_data.mpi import activity, deadlines
from matex_data.mpi.communicator import pickle_error
from matex_data.training.comm.channel import Channel

CallSite = tuple[bytes, int]
"""Call site: digest of the call stack, and the number of times that the program has been there."""
OLD = 600.0
"""Seconds before the start of this job from which a folder is older, however much clocks of file systems differ."""
_START = time.time()
_STDLIB = str(Path(os.__file__).parent)
_LIBRARIES = (str(Path(_STDLIB, "site-packages")), str(Path(_STDLIB, "dist-packages")))
QUERIES = 2000
"""Queries a second that rank 0 answers to all ranks that wait for its save, each in 50 us."""
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
        self.answers: dict[str, Callable[[Any], bytes]] = {}  # by kind of query: function that replies to others
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
            end, pause = time.monotonic() + seconds, 0.0
            while not found:
                assert self.liveness is not None
                reply = self.liveness.query([0], query).get(0, b"")
                if reply:
                    found.append(pickle.loads(reply))
                elif time.monotonic() >= end:
                    return False
                else:
                    time.sleep(min(pause, max(0.0, end - time.monotonic())))
                    pause = min(pause + 0.02, self.size / QUERIES)
            return True

        try:
            with activity.collective(
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
                found=f"this rank is at {activity.user_location()}",
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
                states = self.liveness.states(ranks)
                done = (activity.State.WAITING, activity.State.LEFT)
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
        if about in self.answers:
            return self.answers[about](call_site)
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
        if not own and not is_standard_library(code.co_filename):
            digest.update(f"{code.co_name} {frame.f_lineno} {frame.f_lasti};".encode())
        frame = frame.f_back
    return digest.digest()


def is_standard_library(file: str) -> bool:
    """Return whether a source file belongs to the standard library."""
    return file.startswith(("<frozen", _STDLIB)) and not file.startswith(_LIBRARIES)


def is_library(file: str) -> bool:
    """Return whether a source file belongs to an installed package or to the standard library."""
    return file.startswith(("<frozen", _STDLIB)) or f"{os.sep}site-packages{os.sep}" in file


def _age(path: str) -> float:
    """Return the seconds between the last change of a folder and the start of this job."""
    try:
        return _START - Path(path).stat().st_ctime
    except OSError:
        return 0.0


def failed_save(path: str, error: Exception) -> SaveOutcome:
    """Return the outcome of a failed save."""
    return SaveOutcome(path, pickle_error(error))
