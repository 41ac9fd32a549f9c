"""Files that a script writes on all ranks: rank 0 writes them, the others write private copies.

A rank knows by the call stack and by the path that rank 0 writes the same file. It reads rank 0's result once rank 0
has closed the file. Rank 0 waits for others only before it changes a file that it has read itself: they may be about to
read it, too.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import re
import shutil
import stat
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from matex_data.errors import PartitionError
from matex_data.mpi import abort, activity, deadlines
from matex_data.mpi.communicator import pickle_error
from matex_data.mpi.processes import is_child_process
from matex_data.training.launcher.registry import SaveRegistry, stack_digest

Watch = Callable[[], bool]
"""Function that returns whether a file is closed; called in the liveness thread."""
T = TypeVar("T")
SLACK = 10.0
"""Seconds by which clocks of file systems may differ: older files were complete when rank 0 was last asked."""
READERS = 60.0
"""Seconds that rank 0 waits for others to read a file, at most; a rank that reads it later raises an error."""
LONGEST_PAUSE = 1.0
"""Seconds between two queries of rank 0, at most: 10,000 ranks may wait for it."""
_THREAD = threading.local()
_stat = os.stat


class RootWrite(NamedTuple):
    """Write, removal or renaming of a file by rank 0.

    Attributes
    ----------
    path : absolute path of the file.
    number : number of such calls for this path until then, this one included.
    size : bytes of the file before; -1: there was none.
    copy : copy of the file as it was before; empty if others need none.
    error : pickled error, if the call failed.
    source : path before renaming.
    """

    path: str
    number: int
    size: int = -1
    copy: str = ""
    error: bytes | None = None
    source: str = ""


@dataclass(eq=False)
class RootCall:
    """Call of rank 0 that writes a file.

    Attributes
    ----------
    ended : the call has ended.
    watch : returns whether the file that it has opened is closed; None: it has opened none.
    """

    ended: bool = False
    watch: Watch | None = None

    def is_closed(self) -> bool:
        """Return whether the call has ended, and the file is closed."""
        return self.ended and (self.watch is None or self.watch())


@dataclass
class PrivateCopy:
    """Copy of a file that a rank other than 0 writes.

    Attributes
    ----------
    file : path of the copy.
    handles : whether the files that the script has opened are closed.
    confirmed : rank 0 is known to write the file.
    """

    file: str
    confirmed: bool
    handles: list[Watch] = field(default_factory=list)

    def is_open(self) -> bool:
        """Return whether the script has the file open."""
        return not all(is_closed() for is_closed in self.handles)


class ScriptFiles:
    """Files of the script.

    Parameters
    ----------
    registry : answers the queries of other ranks.
    """

    def __init__(self, registry: SaveRegistry) -> None:
        self.rank = registry.rank
        self._size, self._job = registry.size, registry.job_id
        self._liveness = registry.liveness
        self._passes: Counter[bytes] = Counter()  # by call stack
        self._counts: Counter[str] = Counter()  # by path: writes, removals and renamings
        self._seen: Counter[str] = Counter()  # by path: those of rank 0 whose result this rank has read
        self._asked: list[Any] = []  # questions to rank 0 that it has not answered yet
        # rank 0
        self._writes: defaultdict[bytes, list[RootWrite]] = defaultdict(list)
        self._handles: defaultdict[str, list[RootCall]] = defaultdict(list)
        self._read: set[str] = set()
        self._lost: set[tuple[str, int]] = set()  # versions that were replaced while another rank might read them
        self._copies: list[str] = []
        # other ranks
        self._mine: dict[str, PrivateCopy] = {}
        self._shared: set[bytes] = set()  # call stacks at which rank 0 has written the same file
        self._looked = time.time()  # when rank 0 was last asked which files it has open
        self._folder = ""
        self._own_folders: list[str] = []
        registry.answers["files"] = self._answer
        atexit.register(self._end)

    @property
    def any_private(self) -> bool:
        """Return whether this rank has private copies."""
        return bool(self._mine)

    def add_own_folder(self, folder: str) -> None:
        """Leave alone the files of a folder that this rank has made for itself."""
        self._own_folders.append(str(Path(folder).absolute()) + os.sep)

    def is_own(self, path: str) -> bool:
        """Return whether a file is no concern of other ranks: of the system, or in a temporary folder of this rank."""
        return path.startswith(("/dev/", "/proc/", "/sys/", *self._own_folders))

    @staticmethod
    def is_regular(path: str) -> bool:
        """Return whether a file is a regular one, or does not exist."""
        status = _status(path)
        return status is None or stat.S_ISREG(status.st_mode)

    def write(
        self,
        path: str,
        open_file: Callable[[str], T],
        watch: Callable[[T], Watch],
        *,
        append: bool = False,
        copy: Callable[[str, str], Any] | None = None,
    ) -> T:
        """Open a file for writing: rank 0 the file itself, the others a private copy.

        Parameters
        ----------
        path : absolute path.
        open_file : opens the file of the path that it gets.
        watch : returns whether its result is closed, as a function.
        append : the file is opened to append to it.
        copy : copies a file, if its content may be read or changed; None: it is replaced, or only appended to.

        Raises
        ------
        PartitionError : rank 0 does not come to this call in time.
        """
        if self.rank == 0:
            with self._recorded(path, copy) as call:
                result = open_file(path)
                call.watch = watch(result)
            return result
        target = self._private_file(path, append, copy)
        with unpatched():
            result = open_file(target or path)
        if target:
            self._mine[path].handles.append(watch(result))
        return result

    def change(self, path: str, change: Callable[[], T], source: str = "") -> T | None:
        """Remove, rename or replace a file: rank 0 does, the others wait until it has.

        Parameters
        ----------
        path : absolute path of the file, after renaming.
        change : function that does it.
        source : absolute path before renaming.
        """
        if self.rank == 0:
            if source:
                self._wait_for_readers(source)
            with self._recorded(path, source=source):
                return change()
        done = self._root_write(path)
        if done is None:
            with unpatched():
                return change()
        private = self._mine.pop(source or path, None)
        for within in [name for name in self._mine if name.startswith(path + os.sep)]:
            del self._mine[within]
        if done.error is not None:
            raise pickle.loads(done.error)
        if source and private is not None:
            self._mine[path] = private
        elif source and source != done.source:
            with unpatched():
                os.unlink(source)  # noqa: PTH108  # this rank's own, of another name
        return None

    def to_read(self, path: str) -> str:
        """Return the path of the file to read: that of rank 0 after it has closed it.

        Raises
        ------
        PartitionError : rank 0 does not close the file in time, or has replaced it.
        """
        if self.rank == 0:
            self._read.add(path)
            return path
        private = self._mine.get(path)
        if private is not None:
            if private.is_open():
                return private.file
            self._settle([path])
        elif self._is_recent(path):
            self._await_closed([path])
        return path

    def to_look_at(self, path: str) -> str:
        """Like ``to_read``, but for functions that read no content, of files that this rank has written as well."""
        return self.to_read(path) if path in self._mine else path

    def to_change(self, path: str) -> str:
        """Return the path of the file whose mode, times or length this rank may change: its copy, if it has one."""
        private = self._mine.get(path)
        return path if private is None else private.file

    def settle(self, folder: str | None = None) -> None:
        """Wait until rank 0 has closed the files that this rank has closed, of one folder or all."""
        self._settle([path for path in self._mine if folder in (None, str(Path(path).parent))])

    def _settle(self, paths: list[str]) -> None:
        paths = [path for path in paths if path in self._mine and not self._mine[path].is_open()]
        if paths:
            self._await_closed(paths)
            with unpatched():
                for path in paths:
                    Path(self._mine.pop(path).file).unlink(missing_ok=True)

    def _await_closed(self, paths: list[str]) -> None:
        asked = time.time()
        questions = [(path, max(self._counts[path], self._seen[path])) for path in paths]
        states = self._ask("closed", questions, f"read {paths[0]!r}, which rank 0 has written")
        self._looked = asked
        for path, (count, lost) in zip(paths, states, strict=True):
            if lost:
                raise PartitionError(
                    f"rank 0 has replaced {path!r} before this rank read it",
                    expected="all ranks read a file before rank 0 writes it again",
                    found=f"this rank is at {activity.user_location()}",
                    remedy="synchronize the ranks before the file is written again, by a training step or by "
                    "matex_data.training.allreduce([0.0])",
                )
            self._seen[path] = count

    def _is_recent(self, path: str) -> bool:
        status = _status(path)
        return status is not None and stat.S_ISREG(status.st_mode) and status.st_mtime > self._looked - SLACK

    def _private_file(self, path: str, append: bool, copy: Callable[[str, str], Any] | None) -> str:
        """Return the path of the private copy to write; empty if the file is this rank's own."""
        digest, existing = stack_digest(""), self._mine.get(path)
        if copy is None and digest in self._shared and (existing is not None or not append):
            self._passes[digest] += 1
            self._counts[path] += 1
            return self._made_copy(path, confirmed=False)
        done = self._root_write(path)
        if done is None:
            return ""
        if done.error is not None:
            raise pickle.loads(done.error)
        self._shared.add(digest)
        target = self._made_copy(path, confirmed=True)
        if done.copy and copy is not None:
            with unpatched():
                copy(done.copy, target)
        elif done.size > 0 and append:
            with unpatched(), Path(target).open("wb") as file:
                file.truncate(done.size)  # for the position in the file; it takes no space
        return target

    def _made_copy(self, path: str, confirmed: bool) -> str:
        if path not in self._mine:
            with unpatched():
                self._folder = self._folder or tempfile.mkdtemp(prefix="matex-")
                folder = tempfile.mkdtemp(dir=self._folder)
            self._mine[path] = PrivateCopy(str(Path(folder, Path(path).name)), confirmed)
        self._mine[path].confirmed |= confirmed
        return self._mine[path].file

    def _root_write(self, path: str) -> RootWrite | None:
        """Return the same call of rank 0; None if rank 0 does not make it before it waits for this rank or ends."""
        digest = stack_digest("")
        self._passes[digest] += 1
        question = digest, self._passes[digest], path, self._counts[path], self.rank
        done: RootWrite | None = self._ask("write", question, f"write, rename or remove {path!r}")
        if done is not None:
            self._counts[path] = done.number
        return done

    def _ask(self, about: str, question: Any, purpose: str) -> Any:
        """Return the answer of rank 0, once it has one."""
        asked = about, question
        query = pickle.dumps(("files", asked))
        failed = abort.exit_requested()  # rank 0 may run on, and never come here
        end, pause = time.monotonic() + (abort.GRACE if failed else deadlines.timeout()), 0.05
        assert self._liveness is not None
        self._asked.append(asked)
        try:  # without activity.waiting(): this rank does not wait for a collective call
            while not self._liveness.ended:
                replies = self._liveness.query([0], query)
                answered, answer = pickle.loads(replies[0]) if replies else (False, None)
                if answered:
                    return answer
                if time.monotonic() >= end:
                    if failed:
                        break
                    end += self._extension(purpose)
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        finally:
            self._asked.remove(asked)
        return None if about == "write" else [(0, False)] * len(question)

    def _extension(self, purpose: str) -> float:
        """Return the seconds to wait on for rank 0.

        Raises
        ------
        PartitionError : rank 0 is not busy on behalf of all.
        """
        assert self._liveness is not None
        state, text = self._liveness.states([0])[0]
        if state == activity.State.BUSY:
            return deadlines.timeout()
        raise PartitionError(
            f"this rank is to {purpose}, and has waited {deadlines.timeout():g} s for rank 0",
            expected="rank 0 makes the same call and closes the file, waits for the other ranks, or ends",
            found=f"this rank is at {activity.user_location()}; rank 0 {state.name.lower()} {text}",
            remedy="write files on all ranks alike; if rank 0 may take longer, set MATEX_TIMEOUT to more seconds",
        )

    @contextlib.contextmanager
    def _recorded(
        self, path: str, copy: Callable[[str, str], Any] | None = None, source: str = ""
    ) -> Iterator[RootCall]:
        """Context manager: record a call of rank 0, for queries of the others."""
        digest, call = stack_digest(""), RootCall()
        self._wait_for_readers(path)
        status, count, kept, error = _status(path), self._counts[path] + 1, "", None
        size = -1 if status is None else status.st_size
        self._handles[path] = [*(handle for handle in self._handles[path] if not handle.is_closed()), call]
        self._counts[path] = count
        try:
            with unpatched():
                if copy is not None and size > 0:
                    kept = str(Path(path).with_name(f".{Path(path).name}.{self._job}-{count}"))
                    self._copies.append(kept)
                    copy(path, kept)
                yield call
        except Exception as failed:
            error = pickle_error(failed)
            raise
        finally:
            call.ended = True
            self._writes[digest].append(RootWrite(path, count, size, kept, error, source))

    def _wait_for_readers(self, path: str) -> None:
        """Wait until no other rank may still read the file as this rank has read it."""
        read = {path} & self._read
        if Path(path).is_dir():
            read |= {name for name in self._read if name.startswith(path + os.sep)}
        if not read:
            return
        self._read -= read
        count, ranks = self._counts[path] + 1, list(range(1, self._size))
        query, end = pickle.dumps(("files", ("begun", path))), time.monotonic() + min(READERS, deadlines.timeout())
        while ranks and self._liveness is not None and not self._liveness.ended and time.monotonic() < end:
            for rank, reply in self._liveness.query(ranks, query).items():
                begun, waits, asked = pickle.loads(reply)
                if begun >= count or (all(not self._reply(*a)[0] for a in asked) if asked else waits):
                    ranks.remove(rank)
        if ranks:
            self._lost.add((path, count - 1))

    def _answer(self, details: Any) -> bytes:
        """Reply to a query of another rank; runs in the liveness thread."""
        return pickle.dumps(self._reply(*details))

    def _reply(self, about: str, question: Any) -> Any:
        """Return whether this rank knows the answer to a question of another one, and the answer."""
        if about == "begun":
            return self._counts[question], activity.waits_for_ranks(), list(self._asked)
        if about == "closed":
            return self._closed(question)
        if about == "written":
            written = self._counts[question] > 0
            return written or activity.waits_for_ranks(), written
        return self._write_at(*question)

    def _closed(self, questions: list[tuple[str, int]]) -> tuple[bool, Any]:
        """Return whether rank 0 has closed files, and their states."""
        states = []
        for path, count in questions:
            still_open = sum(not call.is_closed() for call in self._handles.get(path, ()))
            if self._counts[path] - still_open < max(count, still_open > 0):
                return False, None
            states.append((self._counts[path] - still_open, (path, count) in self._lost))
        return True, states

    def _write_at(self, digest: bytes, passes: int, path: str, count: int, rank: int) -> tuple[bool, RootWrite | None]:
        """Return whether this rank knows what it does at a call site, and the write that another rank asks for."""
        waits = activity.waits_for_ranks()  # looked at before the writes, which may follow
        writes = list(self._writes.get(digest, ()))
        for write in writes:
            if write.path == path and write.number > count:
                return True, write
        named_by_rank = len(writes) >= passes and is_named_by_rank(writes[passes - 1].path, path, rank)
        return waits or named_by_rank, None

    def _end(self) -> None:
        """Remove private copies, and the copies for other ranks, when all ranks have ended."""
        if is_child_process():
            return
        with unpatched():
            for path, private in list(self._mine.items()):
                if not private.confirmed and not self._ask("written", path, f"write {path!r}"):
                    shutil.copyfile(private.file, path)  # this rank's own after all
            if self._copies:
                deadlines.leave()
            for copy in self._copies:
                Path(copy).unlink(missing_ok=True)
            if self._folder:
                shutil.rmtree(self._folder, ignore_errors=True)


def _status(path: str) -> os.stat_result | None:
    """Return the status of a file; None if there is none."""
    try:
        return _stat(path)
    except OSError:
        return None


def is_named_by_rank(of_root: str, path: str, rank: int) -> bool:
    """Return whether two paths differ in numbers alone, which are 0 for rank 0 and the rank for the other one.

    Examples
    --------
    >>> is_named_by_rank("log.0", "log.3", 3), is_named_by_rank("log.0", "log.3", 2)
    (True, False)
    """
    one, other = (re.split(r"(\d+)", text) for text in (of_root, path))
    differing = [(a, b) for a, b in zip(one, other, strict=False) if a != b]
    numbers = [(int(a), int(b)) for a, b in differing if a.isdecimal() and b.isdecimal()]
    return len(one) == len(other) and numbers == [(0, rank)] * max(1, len(differing))


def is_unpatched() -> bool:
    """Return whether this thread writes files for this package, which are not those of the script."""
    return getattr(_THREAD, "unpatched", False)


@contextlib.contextmanager
def unpatched() -> Iterator[None]:
    """Context manager: files that this thread opens are not those of the script."""
    before = is_unpatched()
    _THREAD.unpatched = True
    try:
        yield
    finally:
        _THREAD.unpatched = before
