"""Files that a script writes on all ranks: rank 0 writes them, the others write private copies.

Rank 0 keeps a journal of the files that it changes. Another rank knows by it what rank 0 has done already that this
rank is still to do, and sees each file as rank 0 saw it at the same line. After it has closed its copy of a file, it
meets rank 0 when it next reads this file, and reads that of rank 0. So that rank 0 need not wait, it keeps a file that
it has read before it changes it.
"""

from __future__ import annotations

import atexit
import contextlib
import glob
import os
import pickle
import platform
import shutil
import stat
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from matex_data.mpi import abort, deadlines
from matex_data.mpi.communicator import pickle_error
from matex_data.mpi.processes import is_child_process, is_running
from matex_data.paths import is_library
from matex_data.training.launcher.root import Root
from matex_data.training.replacements import setting

T = TypeVar("T")
BLOCK = 1 << 20
"""Bytes that are copied at once."""
SLACK = 10.0
"""Seconds by which clocks of file systems may differ."""
_unpatched: ContextVar[bool] = ContextVar("unpatched", default=False)
_lstat, _listdir, _readlink, _open = os.lstat, os.listdir, os.readlink, os.open
_rename, _link, _symlink, _unlink, _access, _mkdir = os.rename, os.link, os.symlink, os.unlink, os.access, os.mkdir


@dataclass
class Change:
    """Change of a file by rank 0: it writes, renames or removes it, or makes a folder.

    Attributes
    ----------
    path : absolute path.
    existed : there was a file before.
    size : its bytes.
    kept : path at which rank 0 keeps it as it was; empty if nobody needs it.
    closed : the change is complete.
    inode : of the file afterwards; 0: there is none.
    error : pickled error of the call, if it failed.
    result : of saves, what the call has returned, and the state of its object; of other calls, where the path leads to.
    """

    path: str
    existed: bool
    size: int
    kept: str = ""
    ended: bool = False
    closed: bool = False
    inode: int = 0
    error: bytes | None = None
    result: Any = None


class Seen(NamedTuple):
    """File as this rank has to see it.

    Attributes
    ----------
    exists : there is one.
    path : where to read it; if there is none, a path at which there is no file either.
    inode : of the version to read; 0: any.
    size : bytes of it.
    """

    exists: bool
    path: str
    inode: int = 0
    size: int = 0


class Overlay:
    """Files of the script.

    Parameters
    ----------
    root : asks rank 0.
    """

    def __init__(self, root: Root) -> None:
        self.root, self.rank = root, root.rank
        self._journal: list[Change] = []  # of rank 0, as far as this rank knows it
        self._changes: defaultdict[str, list[Change]] = defaultdict(list)  # the same, by path
        self._unclosed: dict[int, Change] = {}  # those of the journal that are not complete, by their numbers
        self._known = time.time()  # when this rank has last asked
        self._read: set[str] = set()  # files that rank 0 has read since it has last changed them
        self._counts: Counter[str] = Counter()  # changes of this rank, by path
        self._mine: dict[str, str] = {}  # private copies, by path
        self._holes: dict[str, int] = {}  # bytes that a file had before this rank appended to its copy, by the copy
        of_joblib = f"joblib_memmapping_folder_{os.getpid()}_"  # arrays for the processes of this rank
        self._own_folders = [f"/dev/shm/{of_joblib}", f"{tempfile.gettempdir()}/{of_joblib}"]
        self._folders: dict[str, str] = {}  # their paths without links, by those that the script gives
        self._links: dict[str, str] = {}  # where the links lead to that the script has made
        self._changed_in: set[str] = set()  # folders in which the script has changed files
        self._begin = os.getcwd()  # noqa: PTH109
        self._keeping: dict[str, str] = {}  # on rank 0: folder of what it keeps of a folder
        self._folder = ""
        self._lock = threading.RLock()
        root.serve("changes", self._reply)
        if root.rank > 0:
            root.before_asking.append(self.settle)
        atexit.register(self._end)
        abort.call_before_end(self._remove)

    def is_private(self, path: str) -> bool:
        """Return whether this rank has a private copy of a file."""
        return path in self._mine

    def add_own_folder(self, folder: str) -> None:
        """Leave alone the files of a folder that this rank has made for itself."""
        self._own_folders.append(os.path.abspath(folder) + os.sep)  # noqa: PTH100

    def is_own(self, path: str) -> bool:
        """Return whether a file is no concern of other ranks: of the system, a library, or a folder of this rank's."""
        of_system = path.startswith(("/dev/", "/proc/", "/sys/")) and not path.startswith("/dev/shm/")
        return of_system or path.startswith(tuple(self._own_folders)) or is_library(path)

    def real(self, path: str, follow: bool = True) -> str:
        """Return the path without links by which the ranks know a file.

        Parameters
        ----------
        path : absolute path.
        follow : also if the file itself is a link.
        """
        folder, name = os.path.split(path)
        if not name:
            return path
        if folder not in self._folders:
            self._folders[folder] = self.real(folder)
        real = os.path.join(self._folders[folder], name)  # noqa: PTH118  # as for abspath
        if not follow:
            return real
        if real in self._links:
            return self._links[real]
        try:
            _readlink(real)
        except OSError:
            return real
        with unpatched():
            return os.path.realpath(real)

    def _note_links(self, path: str, source: str, real: str) -> None:
        """Note where a path leads to after a change by the script, which may have made or removed links."""
        self._folders.clear()
        for name in [name for name in self._links if f"{name}/".startswith((f"{path}/", f"{source}/"))]:
            del self._links[name]
        if real != path:
            self._links[path] = real

    # rank 0

    @contextlib.contextmanager
    def _changed(self, path: str, kind: str, sure: bool = False) -> Iterator[Change]:
        """Context manager: write a change of a file into the journal.

        Parameters
        ----------
        kind : "replace", "append", "change" or "remove".
        sure : keep the file even if the script has not read it.
        """
        status = _status(path)
        change = Change(path, status is not None, 0 if status is None else status.st_size)
        self._note_change(path)
        self._close(path)
        held = any(earlier.path == path for earlier in self._unclosed.values())
        read = path in self._read or (kind == "remove" and any(name.startswith(path + os.sep) for name in self._read))
        self._read.discard(path)
        with unpatched():
            if change.existed and (read or sure or kind == "remove") and not held:
                change.kept = self._keep(path, kind, with_content=read)
            self._add(change)
            try:
                yield change
            except Exception as failed:
                change.error = pickle_error(failed)
                if change.kept and _status(path) is None and kind != "remove":
                    _rename(change.kept, path)
                raise
            finally:
                change.ended = True

    def _keep(self, path: str, kind: str, with_content: bool) -> str:
        """Keep a file as it is for other ranks, and return its path; what is written next is another file.

        Parameters
        ----------
        with_content : otherwise other ranks look for what is removed, but do not read it.
        """
        parent, name = os.path.split(path)
        kept = f"{self._keeping_folder(parent)}/{len(self._journal)}-{name}"
        status = _lstat(path)
        folder = stat.S_ISDIR(status.st_mode)
        if stat.S_ISLNK(status.st_mode):
            _symlink(os.path.realpath(path), kept)
        elif kind == "remove":
            copy = _link if with_content else _copy_hollow
            shutil.copytree(path, kept, copy_function=copy) if folder else copy(path, kept)
        elif status.st_nlink > 1 or _is_open(path, also_reading=True):  # the script sees the change there, too
            shutil.copy2(path, kept)
        else:
            _rename(path, kept)
            if kind != "replace":
                shutil.copy2(kept, path)
        return kept

    def _keeping_folder(self, parent: str) -> str:
        """Return the folder for what is kept of a folder: where a file can be moved to, and libraries look for no data.

        That is below the working directory, or as near to the root of the file system as this user may write, else in
        the folder itself. File systems that are mounted twice look like one, so that a move has to be tried.
        """
        if parent not in self._keeping:
            name = f".matex-{platform.node()}-{os.getpid()}-{len(self._keeping)}"
            made = self._keeping[parent] = f"{parent}/{name}"
            _mkdir(made)
            for above in (self._begin, *map(str, reversed(Path(parent).parents))):
                with contextlib.suppress(OSError):
                    _rename(made, f"{above}/{name}")
                    self._keeping[parent] = f"{above}/{name}"
                    break
            self._note_change(self._keeping[parent])
            _remove_abandoned(Path(self._keeping[parent]).parent)
        return self._keeping[parent]

    def _reply(self, known: tuple[int, list[int]]) -> list[tuple[int, Change]]:
        """Return the changes from a number on, and those that were not complete; runs in another thread."""
        begin, unclosed = known
        end = len(self._journal)
        self._close()
        return [(number, self._journal[number]) for number in (*unclosed, *range(begin, end))]

    def _close(self, path: str = "") -> None:
        """Note which files are closed meanwhile: one, or all."""
        with self._lock:
            for number, change in list(self._unclosed.items()):
                if change.ended and path in ("", change.path) and not _is_open(change.path):
                    status = _status(change.path)
                    change.inode = 0 if status is None else status.st_ino
                    change.closed = True
                    del self._unclosed[number]

    def _add(self, change: Change) -> None:
        with self._lock:
            if not change.closed:
                self._unclosed[len(self._journal)] = change
            self._changes[change.path].append(change)
            self._journal.append(change)

    # other ranks

    def _take(self, answer: list[tuple[int, Change]]) -> None:
        with self._lock:
            for number, change in answer:
                if number >= len(self._journal):
                    self._add(change)
                    continue
                vars(self._journal[number]).update(vars(change))
                if change.closed:
                    self._unclosed.pop(number, None)

    def _known_changes(self) -> tuple[int, list[int]]:
        return len(self._journal), list(self._unclosed)

    def _refresh(self) -> None:
        """Ask rank 0 for its changes."""
        now = time.time()

        def take(answer: Any) -> bool:
            self._take(answer)
            return True

        self.root.ask("changes", self._known_changes(), take, "look at files")
        self._known = now

    def _done(self, path: str) -> Change | None:
        """Return this rank's last change of a file as rank 0 made it; None if rank 0 does not make it.

        What this rank has open itself, rank 0 may have open as well.
        """
        number, changes = self._counts[path], self._changes[path]
        is_open = path in self._mine and _is_open(self._mine[path])

        def take(answer: Any) -> bool:
            self._take(answer)
            return len(changes) >= number and (changes[number - 1].closed or (is_open and changes[number - 1].ended))

        if not take([]):
            self.root.ask("changes", self._known_changes(), take, f"go on with {path!r}, which rank 0 writes")
        return changes[number - 1] if len(changes) >= number and changes[number - 1].ended else None

    def _state(self, path: str) -> Seen:
        """Return a file that this rank has no copy of as rank 0 saw it at the same line."""
        status = self._known_status(path)
        changes = self._changes[path]
        if len(changes) > self._counts[path]:  # rank 0 is ahead
            before = changes[self._counts[path]]
            if not before.existed:
                return Seen(False, self._absent())
            return Seen(True, before.kept or path, size=before.size)
        for folder in map(str, Path(path).parents):
            if len(self._changes.get(folder, ())) > self._counts[folder]:
                moved = self._changes[folder][self._counts[folder]]
                kept = moved.kept + path[len(folder) :]
                if not moved.existed or not moved.kept or _status(kept) is None:
                    return Seen(moved.existed and status is not None, path)
                return Seen(True, kept)
        if status is None:
            return Seen(False, path)
        inode = changes[-1].inode if changes and changes[-1].closed and len(changes) == self._counts[path] else 0
        return Seen(True, path, inode, status.st_size)

    def _known_status(self, path: str) -> os.stat_result | None:
        """Return the status of a file at a time until which this rank knows what rank 0 has done with it."""
        changes = self._changes[path]
        while True:
            status, known = _status(path), _version(changes)
            current = known[1] and status is not None and status.st_ino == changes[-1].inode
            if current or not (changes or status is None or status.st_ctime > self._known - SLACK):
                return status
            self._refresh()
            if len(changes) > self._counts[path] or _version(changes) == known:
                return status  # otherwise rank 0 has changed the file, before or after this rank has looked

    def _absent(self) -> str:
        return str(Path(self.private_folder(), "absent", "file"))

    def private_folder(self) -> str:
        """Return the folder of files that are this rank's alone."""
        with unpatched():
            if not self._folder:
                self._folder = tempfile.mkdtemp(prefix="matex-")
                self.add_own_folder(self._folder)
        return self._folder

    def _private(self, path: str, kind: str) -> str:
        """Return the private copy of a file to write; the file itself if it cannot be written."""
        if kind == "change" and path in self._mine and not _is_open(self._mine[path]):
            self._meet(path)
        if path in self._mine:
            if kind == "replace":
                self._holes.pop(self._mine[path], None)
            elif kind == "change":
                self._fill(path)
            return self._mine[path]
        status = _status(path)
        if status is not None and (stat.S_ISDIR(status.st_mode) or not _access(path, os.W_OK)):
            return path
        parent = str(Path(path).parent)
        if not _access(parent, os.W_OK) and not _access(self._state(parent).path, os.W_OK):
            return path
        with unpatched():
            copy = str(Path(tempfile.mkdtemp(dir=self.private_folder()), Path(path).name))
            before = self._state(path) if kind != "replace" else Seen(False, "")
            if before.exists and kind == "change":
                shutil.copyfile(before.path, copy)
            elif before.exists:
                with Path(copy).open("wb") as file:
                    file.truncate(before.size)  # for the position in the file; it takes no space
                self._holes[copy] = before.size
        self._mine[path] = copy
        return copy

    def _fill(self, path: str) -> None:
        """Copy what an appended file began with into the private copy, which is about to be read."""
        copy = self._mine.get(path, "")
        left = self._holes.pop(copy, 0)
        if left:
            with unpatched(), Path(self._state(path).path).open("rb") as file, Path(copy).open("r+b") as filled:
                while left and (block := file.read(min(left, BLOCK))):
                    left -= filled.write(block)

    def _meet(self, path: str) -> None:
        """Take rank 0's file in place of the private copy; or write the file, if rank 0 does not."""
        done = self._done(path)
        copy = self._mine.pop(path)
        with unpatched():
            if done is None:
                begin = self._holes.get(copy, 0)
                with Path(copy).open("rb") as own, Path(path).open("ab" if begin else "wb") as file:
                    own.seek(begin)
                    shutil.copyfileobj(own, file)
            _unlink(copy)
        if done is not None and done.error is not None:
            raise pickle.loads(done.error)

    # all ranks

    def write(self, path: str, kind: str, open_file: Callable[[str], T]) -> T:
        """Open a file for writing: rank 0 the file itself, the others a private copy.

        Parameters
        ----------
        path : absolute path.
        kind : "replace", "append", or "change" if its content may be read or changed.
        open_file : opens the file of the path that it gets.
        """
        if self.rank == 0:
            with self._changed(path, kind, sure=kind == "change"):
                return open_file(path)
        copy = self._private(path, kind)
        self._count(path)
        try:
            with unpatched():
                return open_file(copy)
        finally:
            if _status(copy) is None:  # there was no file to change
                self._mine.pop(path, None)

    def read(self, path: str, open_file: Callable[[str], T]) -> T:
        """Open a file for reading, as rank 0 reads it at the same line."""
        if self.rank == 0:
            self._read.add(path)
            return open_file(path)
        while True:
            seen = self.look(path)
            self._fill(path)
            opened = open_file(seen.path)
            status = _status(seen.path)
            if not seen.inode or (status is not None and status.st_ino == seen.inode):
                return opened  # otherwise rank 0 has changed the file meanwhile

    def look(self, path: str) -> Seen:
        """Return a file as this rank has to see it."""
        copy = self._mine.get(path)
        if copy is not None and _is_open(copy):
            return Seen(True, copy)
        if copy is not None:
            self._meet(path)
        return self._state(path)

    def exists(self, path: str) -> bool:
        """Return whether this rank has to see a file."""
        return os.path.exists(path) if self.rank == 0 else path in self._mine or self._state(path).exists  # noqa: PTH110

    def to_change(self, path: str) -> str:
        """Return the path of the file whose mode and times this rank may change: its copy, or the one that it sees."""
        return self._mine.get(path) or self._state(path).path

    def _note_change(self, path: str) -> None:
        self._changed_in.add(os.path.dirname(path))  # noqa: PTH120

    def _count(self, path: str) -> None:
        """Count a change of this rank, which is not 0."""
        self._counts[path] += 1
        self._note_change(path)

    def has_changes(self, folder: str) -> bool:
        """Return whether the script has changed files in a folder, so that ranks may see different ones."""
        return folder in self._changed_in

    def names(self, folder: str, list_names: Callable[[str], list[str]]) -> list[str]:
        """Return the names in a folder that this rank has to see.

        Parameters
        ----------
        list_names : returns those that the file system shows, of the folder at the path that it gets.
        """
        where = folder
        if self.rank > 0:
            self.settle(folder)
            where = self._state(folder).path
        names = list_names(where)
        shown = {name for name in names if not name.startswith(".matex-")}
        if self.rank > 0:
            self._refresh()  # whatever the list shows of what rank 0 has done, the journal has as well
            for path, changes in list(self._changes.items()):
                parent, name = os.path.split(path)
                if parent == folder and len(changes) > self._counts[path]:
                    (shown.add if changes[self._counts[path]].existed else shown.discard)(name)
            shown |= {path.name for path in map(Path, self._mine) if str(path.parent) == folder}
        return [name for name in names if name in shown] + sorted(shown.difference(names))

    def settle(self, folder: str | None = None) -> None:
        """Meet rank 0 for the files that this rank has closed, of one folder or all."""
        for path, copy in list(self._mine.items()):
            if folder in (None, os.path.dirname(path)) and not _is_open(copy):  # noqa: PTH120
                self._meet(path)

    def change(self, path: str, change: Callable[[], Any], kind: str = "remove", source: str = "") -> Any:
        """Remove, rename or make a file or folder: rank 0 does, the others wait until it has.

        Parameters
        ----------
        path : absolute path, after renaming.
        change : function that does it.
        source : absolute path before renaming.
        """
        if self.rank == 0:
            with contextlib.ExitStack() as stack:
                if source:
                    stack.enter_context(self._changed(source, "remove"))
                changed = stack.enter_context(self._changed(path, kind))
                result = change()
                changed.result = os.path.realpath(path)
                self._note_links(path, source or path, changed.result)
                return result
        self._count(path)
        if source:
            self._count(source)
        done = self._done(path)
        if done is None:
            for name in {path, source} & self._mine.keys():
                self._meet(name)
            with unpatched():
                result = change()
                self._note_links(path, source or path, os.path.realpath(path))
                return result
        for name in [name for name in self._mine if f"{name}/".startswith((f"{path}/", f"{source or path}/"))]:
            _unlink(self._mine.pop(name))
        if done.error is not None:
            raise pickle.loads(done.error)
        self._note_links(path, source or path, done.result)
        return None

    def save(self, path: str, save: Callable[[], Any], state: Callable[[], Any]) -> tuple[Any, Any] | None:
        """Save on rank 0, and return its result and state; on other ranks None if they have to save themselves.

        Parameters
        ----------
        path : absolute path.
        save : function that saves.
        state : returns the state of the saving object.
        """
        if self.rank == 0:
            with self._changed(path, "replace") as change:
                result = save()
                change.result = result, state()
            return change.result  # type: ignore[no-any-return]
        self._count(path)
        done = self._done(path)
        if done is None:
            return None
        if done.error is not None:
            raise pickle.loads(done.error)
        return done.result  # type: ignore[no-any-return]

    def _end(self) -> None:
        """Remove private copies, and what is kept for other ranks, when all ranks have ended."""
        if is_child_process():
            return
        with unpatched():
            for path in list(self._mine):
                with contextlib.suppress(OSError):
                    self._meet(path)
            if self._keeping:
                deadlines.leave()
        self._remove()

    def _remove(self) -> None:
        """Remove private copies, and what is kept."""
        with unpatched():
            for folder in (*self._keeping.values(), self._folder):
                if folder:
                    shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    """Remove what jobs have kept in a folder that were killed on this machine."""
    for folder in parent.glob(f".matex-{glob.escape(platform.node())}-*-*"):
        process = folder.name.split("-")[-2]
        if process.isdecimal() and not is_running(int(process)):
            shutil.rmtree(folder, ignore_errors=True)


def _version(changes: list[Change]) -> tuple[int, bool]:
    """Return the number of changes of a file, and whether the last one is complete."""
    return len(changes), bool(changes) and changes[-1].closed


def _status(path: str) -> os.stat_result | None:
    """Return the status of a file; None if there is none."""
    try:
        return _lstat(path)
    except OSError:
        return None


def is_regular(path: str) -> bool:
    """Return whether a file is a regular one, or does not exist."""
    status = _status(path)
    return status is None or stat.S_ISREG(status.st_mode)


def _copy_hollow(path: str, copy: str) -> None:
    """Make a file that looks like another one, with holes in place of its content."""
    with Path(copy).open("wb") as file:
        file.truncate(_lstat(path).st_size)
    shutil.copystat(path, copy)


def _is_open(path: str, also_reading: bool = False) -> bool:
    """Return whether this process has a file open for writing. Where there is no /proc it is taken to be closed."""
    with unpatched(), contextlib.suppress(OSError):
        real = os.path.realpath(path)
        for number in _listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if _readlink(f"/proc/self/fd/{number}") == real:
                    if also_reading:
                        return True
                    info = _open(f"/proc/self/fdinfo/{number}", os.O_RDONLY)
                    try:
                        flags = os.read(info, 200).split(b"flags:")[1].split()[0]
                    finally:
                        os.close(info)
                    if int(flags, 8) & (os.O_WRONLY | os.O_RDWR):
                        return True
    return False


def is_unpatched() -> bool:
    """Return whether this thread writes files for this package, which are not those of the script."""
    return _unpatched.get()


def unpatched() -> contextlib.AbstractContextManager[None]:
    """Return a context manager: files that this thread opens are not those of the script."""
    return setting(_unpatched, True)
