"""Files that a script writes on all ranks: rank 0 writes them, the others write private copies.

Rank 0 keeps a journal of its changes. On another rank a path has one of three states, by which each operation knows
what to do:

- no change of it is under way: the rank sees the file as rank 0 saw it at the same line. If rank 0 has gone on since,
  that is what rank 0 has kept of the file, or nothing where rank 0 has made it;
- the rank has a private copy open, and sees that;
- the rank has closed its copy, or has removed, renamed or made the file: it meets rank 0, that is, waits until rank 0
  has done the same, when it next looks at the path. If rank 0 never does, the rank changes the file itself.

So that rank 0 need not wait, it keeps a file that it has read before it changes it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import shutil
import stat
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from matex_data.mpi import abort, deadlines
from matex_data.mpi.communicator import pickle_error
from matex_data.mpi.processes import is_child_process, remove_unfinished, unfinished_name
from matex_data.paths import is_library
from matex_data.training.launcher.journal import (
    Change,
    Journal,
    Numbered,
    is_open,
    is_unpatched,
    status_of,
    unpatched,
    version_of,
)
from matex_data.training.launcher.root import Root

T = TypeVar("T")
BLOCK = 1 << 20
"""Bytes that are copied at once."""
SLACK = 10.0
"""Seconds by which clocks of file systems may differ."""
HIDDEN = ".matex-"
"""Beginning of the names of folders in which rank 0 keeps files."""


class Seen(NamedTuple):
    """File as this rank has to see it.

    Attributes
    ----------
    exists : there is one.
    path : where to read it; if there is none, a path at which there is no file either.
    size : bytes of it.
    version : of ``version_of``; empty: any.
    """

    exists: bool
    path: str
    size: int = 0
    version: tuple[int, ...] = ()

    def is_current(self) -> bool:
        """Return whether the file is surely as it was seen; of a folder, only rank 0 knows what lies in it."""
        version = version_of(status_of(self.path))
        return not self.is_folder() and bool(version) == self.exists and self.version in ((), version)

    def is_folder(self) -> bool:
        """Return whether there is a folder."""
        status = status_of(self.path)
        return status is not None and stat.S_ISDIR(status.st_mode)

    def is_same(self, other: Seen) -> bool:
        """Return whether this is the same file as one that was seen at another time."""
        return (self.exists, self.path, self.version[:1]) == (other.exists, other.path, other.version[:1])


class Overlay:
    """Files of the script.

    Parameters
    ----------
    root : asks rank 0.

    Attributes
    ----------
    working : on other ranks, folder in which the script is; empty: that of the process.
    creating : lock of the thread that makes what must not exist.
    """

    def __init__(self, root: Root) -> None:
        self.root, self.rank = root, root.rank
        self.working, self.creating = "", threading.RLock()
        self._journal = Journal()
        self._known = self._start = time.time()  # when this rank has last asked
        self._read: set[str] = set()  # files that rank 0 has read since it has last changed them
        self._linked: set[int] = set()  # inodes of files that rank 0 keeps by links, at other paths after a rename
        self._counts: Counter[str] = Counter()  # changes of this rank, by path
        self._told: dict[str, tuple[int, ...]] = {}  # versions of which rank 0 was asked since this rank's last change
        self._mine: dict[str, str] = {}  # private copies, by path
        self._outlines: dict[str, tuple[int, str]] = {}  # files as they were before a change, without content, by path
        self._linking: dict[tuple[tuple[str, str], ...], str] = {}  # folders of links, by these
        self._holes: dict[str, int] = {}  # bytes that a file had before this rank appended to its copy, by the copy
        of_joblib = f"joblib_memmapping_folder_{os.getpid()}_"  # arrays for the processes of this rank
        self._own_folders = [f"/dev/shm/{of_joblib}", f"{tempfile.gettempdir()}/{of_joblib}"]
        self._folders: dict[str, str] = {}  # their paths without links, by those that the script gives
        self._links: dict[str, str] = {}  # where the links lead to that the script has made
        self._begin = os.getcwd()  # noqa: PTH109
        self._keeping: dict[str, str] = {}  # on rank 0: folder of what it keeps of a folder
        self._folder = ""
        root.serve("changes", self._journal.reply)
        if root.rank > 0:
            root.before_asking.append(self.settle)
        atexit.register(self._end)
        abort.call_before_end(self._remove)

    # paths

    def path_of(self, path: Any, follow: bool = True) -> str:
        """Return the path by which the ranks know a file of the script; empty if the call concerns this rank alone.

        Parameters
        ----------
        path : as the script gives it: relative, with links; or of another kind.
        follow : also if the file itself is a link.
        """
        if not isinstance(path, str | bytes | os.PathLike) or is_unpatched() or not self.root.is_shared():
            return ""
        if b"://" in os.fsencode(path):
            return ""
        absolute = self._absolute(os.fsdecode(path))
        return "" if self.is_own(absolute) else self.real(absolute, follow)

    def _absolute(self, path: str) -> str:
        """Return an absolute path: what is above a link is above the folder to which it leads."""
        folder, above, rest = path.rpartition("/..")
        if above and folder.strip("./"):
            path = f"{self.real(self._absolute(folder))}/..{rest}"
        return os.path.abspath(path)  # noqa: PTH100  # 1 us, where Path takes 10

    def add_own_folder(self, folder: str) -> None:
        """Leave alone the files of a folder that this rank has made for itself."""
        self._own_folders.append(os.path.abspath(folder) + os.sep)  # noqa: PTH100

    def is_own(self, path: str) -> bool:
        """Return whether a file is no concern of other ranks: of the system, GDAL, a library, or this rank alone."""
        of_system = path.startswith(("/dev/", "/proc/", "/sys/", "/vsi")) and not path.startswith("/dev/shm/")
        return of_system or path.startswith(tuple(self._own_folders)) or is_library(path)

    def real(self, path: str, follow: bool = True) -> str:
        """Return an absolute path without links; ``follow`` as for ``path_of``."""
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
        with unpatched():
            if not os.path.islink(real):  # noqa: PTH114
                return real
            seen = self._state(real) if self.rank > 0 else Seen(True, real)  # rank 0 may have made another one
            return os.path.realpath(seen.path) if seen.exists else real

    def argument(self, given: Any, path: str, target: str) -> Any:
        """Return what to call a function with: a path as the script gives it, or the one to use in its place.

        A path with a link, which rank 0 may have pointed elsewhere meanwhile, is replaced on other ranks.

        Parameters
        ----------
        path : of ``path_of``.
        target : path to use.
        """
        is_named = isinstance(given, str | bytes | os.PathLike)
        has_link = self.rank > 0 and is_named and os.path.abspath(os.fsdecode(given)) != path  # noqa: PTH100
        return target if has_link or target != path else given

    def _note_links(self, path: str, source: str, real: str) -> None:
        """Note where a path leads to after a change by the script, which may have made or removed links.

        The working directory may have been renamed.
        """
        self._folders.clear()
        for name in _within(self._links, path, source):
            del self._links[name]
        if real != path:
            self._links[path] = real
        if path != source and _within([self.working], source):
            os.chdir(path + self.working[len(source) :])

    # rank 0

    @contextlib.contextmanager
    def _changed(self, path: str, kind: str) -> Iterator[Change]:
        """Context manager: write a change of a file into the journal; ``kind`` as of ``open`` or ``change``."""
        status = status_of(path)
        change = Change(path, False, 0)
        if status is not None:
            times = status.st_atime_ns, status.st_mtime_ns
            change = Change(path, True, status.st_size, status.st_mode, times)
        self._journal.close(path)
        read = path in self._read or (kind == "remove" and bool(_within(self._read, path)))
        read = read or (status is not None and status.st_ino in self._linked)
        self._read.discard(path)
        change.held = self._journal.is_held(path)
        with unpatched():
            moves: list[tuple[str, str]] = []
            if change.existed and not change.held and kind != "make" and (read or kind in ("change", "remove")):
                change.kept, moves = self._keep(path, kind, read)
            try:
                self._journal.add(change, moves)
                yield change
            except BaseException as failed:  # an interrupt as well: what is kept is removed when the ranks end
                change.error = pickle_error(failed) if isinstance(failed, Exception) else None
                if change.kept and status_of(path) is None and kind != "remove":
                    os.rename(change.kept, path)  # noqa: PTH104
                    change.kept = ""
                raise
            finally:
                change.ended = True

    def _keep(self, path: str, kind: str, with_content: bool) -> tuple[str, list[tuple[str, str]]]:
        """Keep a file as it is for other ranks; what is written next is another file.

        Parameters
        ----------
        with_content : otherwise other ranks look at the file, but do not read it.

        Returns
        -------
        kept : where it is.
        moves : files that are still to be renamed, as for ``Journal.add``.
        """
        parent, name = os.path.split(path)
        kept = f"{self._keeping_folder(parent)}/{len(self._journal)}-{name}"
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            Path(kept).symlink_to(os.path.realpath(path))
        elif kind == "remove":
            copy = self._link if with_content else _copy_hollow
            shutil.copytree(path, kept, copy_function=copy) if stat.S_ISDIR(mode) else copy(path, kept)
        elif stat.S_ISDIR(mode):  # a model that was loaded is saved into its folder again
            shutil.copytree(path, kept)
        elif self._is_linked(path) or is_open(path, also_reading=True):  # the script sees the change there, too
            shutil.copy2(path, kept)
        elif kind == "replace":
            return kept, [(path, kept)]
        else:
            shutil.copy2(path, fresh := f"{kept}-fresh")
            return kept, [(path, kept), (fresh, path)]
        return kept, []

    def _link(self, path: str, kept: str) -> None:
        self._linked.add(os.lstat(path).st_ino)
        os.link(path, kept)

    def _is_linked(self, path: str) -> bool:
        """Return whether the script has a file at another path as well."""
        status = os.lstat(path)
        return status.st_nlink > 1 and status.st_ino not in self._linked

    def _keeping_folder(self, parent: str) -> str:
        """Return the folder for what is kept of a folder: where a file can be moved to, and libraries look for no data.

        That is below the working directory, or as near to the root of the file system as this user may write, else in
        the folder itself. File systems that are mounted twice look like one, so that a move has to be tried.
        """
        with self.creating:
            if parent not in self._keeping:
                made = Path(parent, unfinished_name(HIDDEN, str(len(self._keeping))))
                made.mkdir()
                for above in (Path(self._begin), *reversed(made.parents[1:])):
                    with contextlib.suppress(OSError):
                        made = made.rename(above / made.name)
                        break
                self._keeping[parent] = str(made)
                remove_unfinished(made.parent, HIDDEN)
            return self._keeping[parent]

    # other ranks

    def _ask(self, purpose: str, enough: Callable[[], bool]) -> None:
        """Ask rank 0 for its changes until this rank knows enough of them, or rank 0 makes no more."""

        def take(answer: Numbered) -> bool:
            self._journal.take(answer)
            return enough()

        self.root.ask("changes", self._journal.known(), take, purpose)

    def _refresh(self) -> None:
        """Ask rank 0 for its changes so far."""
        now = time.time()
        self._ask("look at files", lambda: True)
        self._known = now

    def _done(self, path: str) -> Change | None:
        """Return this rank's last change of a file as rank 0 made it; None if rank 0 does not make it.

        What this rank has open itself, rank 0 may have open as well.
        """
        number = self._counts[path]
        held = path in self._mine and is_open(self._mine[path])

        def last() -> Change | None:
            change = next(iter(self._journal.of(path)[number - 1 : number]), None)
            return change if change is not None and change.ended else None

        def is_complete() -> bool:
            change = last()
            return change is not None and (change.closed or held or self._is_held(path))

        if not is_complete():
            self._ask(f"go on with {path!r}, which rank 0 writes", is_complete)
        self._told.clear()
        return last()

    def _later(self, path: str) -> list[Change]:
        """Return the changes of a file that rank 0 has made, and this rank has not."""
        return self._journal.of(path)[self._counts[path] :]

    def _is_held(self, path: str) -> bool:
        """Return whether rank 0 had a file still open when it next changed it, so that nothing was kept between."""
        return any(change.held for change in self._later(path)[:1])

    def _first(self, path: str) -> tuple[Change | None, str]:
        """Return the first change since this rank's that tells where it finds a file, and what of the path is below.

        A call that has made nothing, since there was a folder, tells nothing, nor does one that replaced what nobody
        had read.
        """
        telling = [
            (change, path[len(above) :])
            for above in (path, *map(str, Path(path).parents))
            for change in self._later(above)
            if change.kept or not change.existed
        ]
        return min(telling, key=lambda one: one[0].number, default=(None, ""))

    def _state(self, path: str) -> Seen:
        """Return a file that this rank has no copy of as rank 0 saw it at the same line."""
        status = self._known_status(path)
        (first, below), later = self._first(path), self._later(path)
        if first is not None and not first.existed:
            return Seen(False, str(Path(self.private_folder(), "absent", "file")))
        if first is not None:
            path = first.kept + below
            status = status_of(path)
        elif later and status is None:
            return Seen(True, path, size=later[0].size)
        if status is None:
            return Seen(False, path)
        return Seen(True, path, later[0].size if later else status.st_size, version_of(status))

    def _known_status(self, path: str) -> os.stat_result | None:
        """Return the status of a file at a time until which this rank knows what rank 0 has done with it."""
        while True:
            status, changes = status_of(path), self._journal.of(path)
            known = len(changes), bool(changes) and changes[-1].closed
            version = version_of(status)
            current = (known[1] and bool(version) and version == changes[-1].version) or self._told.get(path) == version
            if current or not (changes or status is None or status.st_ctime > self._known - SLACK):
                return status
            self._refresh()
            changes = self._journal.of(path)
            if self._later(path) or known == (len(changes), bool(changes) and changes[-1].closed):
                self._told[path] = version
                return status  # otherwise rank 0 has changed the file, before or after this rank has looked

    def private_folder(self) -> str:
        """Return the folder of files that are this rank's alone."""
        with unpatched():
            if not self._folder:
                self._folder = tempfile.mkdtemp(prefix="matex-")
                self.add_own_folder(self._folder)
        return self._folder

    def _private(self, path: str, kind: str) -> str:
        """Return the private copy of a file to write; the file as this rank sees it, if it cannot be written."""
        if kind == "change" and path in self._mine and not is_open(self._mine[path]):
            self._meet(path)
        if path in self._mine:
            if kind == "replace":
                self._holes.pop(self._mine[path], None)
            elif kind == "change":
                self._fill(path)
            return self._mine[path]
        with unpatched():
            parent = os.path.dirname(path)  # noqa: PTH120  # which rank 0 may have made or removed since
            for at, refuses in ((path, _is_no_file_to_write), (parent, _is_read_only)):
                if (at == parent or refuses(at)) and self._steady(at, self._state, refuses):
                    return self._state(at).path + path[len(at) :]
            copy = str(Path(tempfile.mkdtemp(dir=self.private_folder()), Path(path).name))
            before = self._state(path) if kind != "replace" else Seen(False, "")
            if before.exists and kind == "change":
                self._steady(path, self._state, lambda at: shutil.copyfile(at, copy))
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
            with (
                unpatched(),
                self._steady(path, self._state, lambda at: Path(at).open("rb")) as file,
                Path(copy).open("r+b") as filled,
            ):
                while left and (block := file.read(min(left, BLOCK))):
                    left -= filled.write(block)

    def _meet(self, path: str) -> None:
        """Take rank 0's file in place of the private copy; or write the file, if rank 0 does not.

        The copy remains while rank 0 has the file open: memory that Python frees late may hold it on one rank alone.
        """
        done = self._done(path)
        if self._is_held(path):
            return
        copy = self._mine.pop(path)
        with unpatched():
            if done is None:
                begin = self._holes.get(copy, 0)
                with Path(copy).open("rb") as own, Path(path).open("ab" if begin else "wb") as file:
                    own.seek(begin)
                    shutil.copyfileobj(own, file)
            Path(copy).unlink()
        if done is not None and done.error is not None:
            raise pickle.loads(done.error)

    # all ranks

    def open(self, path: str, kind: str, open_file: Callable[[str], T]) -> T:
        """Open a file: for writing, rank 0 the file itself, the others a private copy; for reading, as rank 0 sees it.

        Parameters
        ----------
        path : of ``path_of``.
        kind : "replace", "append", or "change" if its content may be read or changed; empty to read.
        open_file : opens the file of the path that it gets.
        """
        if not kind:
            return self._opened_to_read(path, open_file)
        if self.rank == 0:
            with self._changed(path, kind):
                return open_file(path)
        copy = self._private(path, kind)
        self._counts[path] += 1
        try:
            with unpatched():
                return open_file(copy)
        except Exception:
            if path in self._mine and status_of(copy) is not None and not is_open(copy):
                self._meet(path)  # whose error is rank 0's
            raise
        finally:
            if status_of(copy) is None:  # there was no file to change
                self._mine.pop(path, None)

    def _opened_to_read(self, path: str, open_file: Callable[[str], T]) -> T:
        if self.rank == 0:
            with unpatched():
                self._read.update((path,), *([f"{at}/{name}" for name in names] for at, _, names in os.walk(path)))
            return open_file(path)

        def call(target: str) -> T:
            self._fill(path)
            return open_file(target)

        return self._steady(path, self._whole, call)

    def _whole(self, path: str) -> Seen:
        """Return a file, or a folder with links to files where rank 0 has since changed what lies in it."""
        if not (seen := self.look(path)).is_folder():
            return seen
        for own in _within(self._mine, path):
            self.look(own)
        self._refresh()  # a change of what lies in it does not show
        if not any(map(self._later, _within(self._journal.paths(), path))) and not _within(self._mine, path):
            return self.look(path)
        with unpatched():
            links = tuple(self._links_within(path))
            if links not in self._linking:
                linking = Path(tempfile.mkdtemp(dir=self.private_folder()), Path(path).name)
                linking.mkdir()
                for below, target in links:
                    (linking / below).parent.mkdir(parents=True, exist_ok=True)
                    (linking / below).symlink_to(target)
                self._linking[links] = str(linking)
        return Seen(True, self._linking[links])

    def _links_within(self, folder: str, below: str = "") -> Iterator[tuple[str, str]]:
        """Yield the files in a folder as this rank has to see them: their paths below it, and where they are."""
        for name in self.names(os.path.join(folder, below), os.listdir):  # noqa: PTH118
            inner = os.path.join(below, name)  # noqa: PTH118
            seen = self.look(os.path.join(folder, inner))  # noqa: PTH118
            if seen.is_folder():
                yield from self._links_within(folder, inner)
            elif seen.exists:
                yield inner, seen.path

    def view(self, path: str, call: Callable[[str], T]) -> T:
        """Return what a function returns, or raise what it raises, for a file as this rank has to see it.

        Parameters
        ----------
        call : looks at the file of the path that it gets.
        """
        return self._steady(path, self._outline, call)

    def _outline(self, path: str) -> Seen:
        """Return a file as this rank has to see it; without content, where rank 0 has changed it and kept nothing."""
        seen, change = self.look(path), next(iter(self._later(path)), None)
        if path in self._mine or change is None or change.kept or not stat.S_ISREG(change.mode):
            return seen
        first, _ = self._first(path)
        if first is not None and first.number < change.number:  # of a folder above
            return seen
        if self._outlines.get(path, (-1, ""))[0] != change.number:
            outline = Path(tempfile.mkdtemp(dir=self.private_folder()), Path(path).name)
            with unpatched():
                with outline.open("wb") as file:
                    file.truncate(change.size)
                os.utime(outline, ns=change.times)
                outline.chmod(stat.S_IMODE(change.mode))
            self._outlines[path] = change.number, str(outline)
        return Seen(True, self._outlines[path][1], size=change.size)

    def touch(self, path: str, call: Callable[[str], T]) -> T:
        """Like ``view``, for a file whose mode and times this rank may change: its copy, or the one that it sees."""

        def find(path: str) -> Seen:
            return Seen(True, self._mine[path]) if path in self._mine else self._state(path)

        return self._steady(path, find, call)

    def _steady(self, path: str, find: Callable[[str], Seen], call: Callable[[str], T]) -> T:
        """Call a function with the path of a file, again if rank 0 has put another one there meanwhile."""
        seen = find(path)
        while True:
            called, error = seen, None
            try:
                result = call(seen.path)
            except Exception as failed:  # TensorFlow's and pyarrow's are no OSError
                error = failed
            if not seen.is_current():
                seen = find(path)  # by what rank 0 has done meanwhile; others may write files as well
            if seen.is_same(called):
                if error is not None:
                    raise error
                return result

    def look(self, path: str) -> Seen:
        """Return a file as this rank has to see it."""
        if self.rank == 0:
            return Seen(status_of(path) is not None, path)
        if path in self._mine and not is_open(self._mine[path]):
            self._meet(path)
        return Seen(True, self._mine[path]) if path in self._mine else self._state(path)

    def has_folder(self, path: str) -> bool:
        """Return whether there is the folder of a file, as this rank has to see it."""
        return self.look(os.path.dirname(path)).exists  # noqa: PTH120

    def has_private(self, folder: str) -> bool:
        """Return whether this rank has private copies of files in a folder."""
        return any(os.path.dirname(path) == folder for path in self._mine)  # noqa: PTH120

    def is_private(self, path: str) -> bool:
        """Return whether this rank has a private copy of a file."""
        return path in self._mine

    def differs(self, path: str) -> bool:
        """Return whether this rank has to see another file than the file system shows at a path."""
        return self.rank > 0 and (path in self._mine or bool(self._later(path)))

    def is_recent(self, path: str) -> bool:
        """Return whether a file may have been made, changed or removed since the ranks began, by the file system."""
        while (status := status_of(path)) is None and path != os.sep:
            path = os.path.dirname(path)  # noqa: PTH120  # whose time is that of the last file made or removed
        return status is None or status.st_ctime > self._start - SLACK

    def names(self, folder: str, list_names: Callable[[str], list[str]]) -> list[str]:
        """Return the names in a folder that this rank has to see.

        Parameters
        ----------
        list_names : returns those that the file system shows, of the folder at the path that it gets.
        """
        if self.rank == 0:
            return [name for name in list_names(folder) if not name.startswith(HIDDEN)]
        self.settle(folder)
        while True:
            where = self._state(folder).path
            first, _ = self._first(folder)
            names, missing = [], None
            try:
                names = list_names(where)
            except OSError as error:
                missing = error
            self._refresh()  # whatever the list shows of what rank 0 has done, the journal has as well
            if self._first(folder)[0] is first:
                break
        if missing is not None:
            raise missing
        shown = {name for name in names if not name.startswith(HIDDEN)}
        for path in self._journal.paths():
            parent, name = os.path.split(path)
            later = self._later(path) if parent == folder else []
            if later and (first is None or later[0].number < first.number):  # otherwise in another folder of this name
                (shown.add if later[0].existed else shown.discard)(name)
        shown |= {path.name for path in map(Path, self._mine) if str(path.parent) == folder}
        return [name for name in names if name in shown] + sorted(shown.difference(names))

    def settle(self, folder: str | None = None) -> None:
        """Meet rank 0 for the files that this rank has closed, of one folder or all."""
        for path, copy in list(self._mine.items()):
            if folder in (None, os.path.dirname(path)) and not is_open(copy):  # noqa: PTH120
                self._meet(path)

    def change(self, path: str, change: Callable[[], T], kind: str, source: str = "") -> T:
        """Change a file without opening it, such as remove, rename or save it: rank 0 does, the others wait until then.

        Return what rank 0's call has returned.

        Parameters
        ----------
        path : of ``path_of``, after renaming.
        change : function that does it.
        kind : "remove"; "replace"; "change" if it may leave the file there; or "make" if an existing file stays as it
            is.
        source : path before renaming.
        """
        if self.rank == 0:
            with contextlib.ExitStack() as stack:
                if source:
                    stack.enter_context(self._changed(source, "remove"))
                changed = stack.enter_context(self._changed(path, kind))
                result = changed.result = change()
                changed.real = os.path.realpath(path)
                self._note_links(path, source or path, changed.real)
                return result
        self._counts[path] += 1
        if source:
            self._counts[source] += 1
        done = self._done(path)
        if done is None:
            for name in {path, source} & self._mine.keys():
                self._meet(name)
            with unpatched():
                result = change()
                self._note_links(path, source or path, os.path.realpath(path))
                return result
        for name in _within(self._mine, path, source or path):
            if kind == "remove" or (name == path and kind != "make"):  # saves leave other files of a folder alone
                Path(self._mine.pop(name)).unlink()
        if done.error is not None:
            raise pickle.loads(done.error)
        self._note_links(path, source or path, done.real)
        return done.result  # type: ignore[no-any-return]

    def make_alone(self, make: Callable[[], T], name: Callable[[T], str]) -> T:
        """Make a file that there is not for other ranks, which make their own of other names.

        Parameters
        ----------
        name : returns the name of what was made.
        """
        if self.rank > 0:
            return make()
        with self._journal.lock:  # whoever lists the file finds it in the next reply
            made = make()
            path = self.real(os.path.abspath(name(made)))  # noqa: PTH100
            self._journal.add(Change(path, False, 0, ended=True, closed=True))
        return made

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


def _within(paths: Iterable[str], *folders: str) -> list[str]:
    """Return the paths that are one of these, or lie in one."""
    return [path for path in paths if f"{path}/".startswith(tuple(f"{folder}/" for folder in folders))]


def _is_read_only(path: str) -> bool:
    return not os.access(path, os.W_OK)


def _is_no_file_to_write(path: str) -> bool:
    status = status_of(path)
    return status is not None and (stat.S_ISDIR(status.st_mode) or _is_read_only(path))


def _copy_hollow(path: str, copy: str) -> None:
    """Make a file that looks like another one, with holes in place of its content."""
    with Path(copy).open("wb") as file:
        file.truncate(os.lstat(path).st_size)
    shutil.copystat(path, copy)
