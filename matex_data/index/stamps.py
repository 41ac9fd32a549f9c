"""Detect files that change after they were indexed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from matex_data.declared import declared
from matex_data.errors import ChangedFile, shortened
from matex_data.storage import objects

NO_INODE = 0
MOST_NAMED = 8  # parts of a file in a message


@declared
@dataclass(frozen=True)
class Stamp:
    """State of a file when it was indexed.

    Compare stamps for equality only on the rank that took the first of them: inodes differ between the nodes of some
    file systems, and each node sees a change of a path only after its own attribute cache has expired (on NFS, after
    seconds). Any rank sees the size and the time of a file that it has just opened: `fits` compares these.

    Parameters
    ----------
    size : bytes.
    mtime_ns : time of the last modification, in nanoseconds since 1970-01-01 UTC.
    inode : inode number; differs for another file of the same name. With parts: a digest of all states. ``NO_INODE``:
        not known, as of files that an earlier job has indexed, perhaps elsewhere, before they were copied.
    parts : names of other files whose states belong to that of the file, see `part_state`.
    """

    size: int
    mtime_ns: int
    inode: int
    parts: tuple[str, ...] = ()

    @classmethod
    def of(cls, path: str, parts: Iterable[str] = ()) -> Stamp:
        """Return the current state of a file, with that of its parts.

        Raises
        ------
        OSError : the file does not exist or is not accessible.
        """
        # A store has dozens of parts, and pathlib takes as long as the system.
        own = cls.of_object(objects.state(path)) if objects.is_url(path) else cls.of_status(os.stat(path))  # noqa: PTH116
        return own.with_parts(path, {name: part_state(path, name) for name in parts})

    @classmethod
    def of_status(cls, status: os.stat_result) -> Stamp:
        """Return the state of a file that the system has told."""
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)

    @classmethod
    def of_object(cls, state: objects.ObjectState) -> Stamp:
        """Return the state of an object of a store, whose tag takes the place of an inode number."""
        microseconds = (state.changed - datetime.fromtimestamp(0, UTC)) // timedelta(microseconds=1)
        tag = hashlib.blake2b(state.tag.encode(), digest_size=8).digest()
        return cls(state.size, 1000 * microseconds, int.from_bytes(tag, "little"))

    def with_parts(self, path: str, states: Mapping[str, PartState]) -> Stamp:
        """Return the state of a file with that of its parts, which any rank finds equal; with no parts, its own.

        Parameters
        ----------
        states : of the parts, by name.
        """
        if not states:
            return self
        own = self if objects.is_url(path) else (self.size, self.mtime_ns)
        digest = hashlib.blake2b(repr((own, sorted(states.items()))).encode(), digest_size=8).digest()
        latest = max(self.mtime_ns, *(changed for _, changed in states.values()))
        return Stamp(self.size, latest, int.from_bytes(digest, "little"), tuple(states))

    def fits(self, other: Stamp) -> bool:
        """Return whether a file with the state ``other`` on any rank may be the one of this stamp."""
        return self == other if self.parts else (self.size, self.mtime_ns) == (other.size, other.mtime_ns)

    def is_of(self, path: str, other: Stamp) -> bool:
        """Return whether a file or object with the state ``other`` on any rank may be the one of this stamp."""
        return other == self if objects.is_url(path) else self.fits(other)

    def __str__(self) -> str:
        second, rest = divmod(self.mtime_ns, 10**9)
        time = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%d %H:%M:%S")
        number = f"inode {self.inode or 'not known'}"
        if self.parts:
            number = f"state {self.inode:x} together with {', '.join(shortened(self.parts, MOST_NAMED))}"
        return f"{self.size} bytes, changed {time}.{rest:09d} UTC, {number}"


PartState = tuple[int, int]
"""Size and time of the last modification of a part of a file."""
ABSENT: PartState = (-1, -1)
_BESIDE = "../"


def part_state(path: str, name: str) -> PartState:
    """Return the state of a part of a file; ``ABSENT`` if there is none.

    Parameters
    ----------
    name : of the part: path within the folder ``path``; with ``../``, beside the file ``path``.

    Raises
    ------
    OSError : the system does not tell.
    """
    folder = path.rpartition("/") if name.startswith(_BESIDE) else (path, "/")
    try:
        found = Stamp.of("".join(folder[:2]) + name.removeprefix(_BESIDE))
    except (FileNotFoundError, NotADirectoryError):
        return ABSENT
    return found.size, found.mtime_ns


def check_stamp(path: str, stamp: Stamp | None, own: bool = True) -> ChangedFile | None:
    """Return the error to raise if the file at ``path`` has changed since its stamp was taken; None if it has not.

    A file without a stamp counts as unchanged. Of the files that it refers to, the parts of the stamp are checked;
    others (external and virtual datasets of HDF5) are not.

    Parameters
    ----------
    own : this is the rank that took the stamp, see `Stamp`.
    """
    if stamp is None:
        return None
    try:
        found = Stamp.of(path, stamp.parts)
    except OSError as error:
        return changed(path, stamp, error)
    same = found == stamp if own and stamp.inode != NO_INODE else stamp.is_of(path, found)
    return None if same else changed(path, stamp, found)


def changed(path: str, stamp: Stamp, found: Stamp | OSError) -> ChangedFile:
    """Return the error of a file that has changed.

    Parameters
    ----------
    stamp : its state when it was indexed.
    found : its state now, or why the system does not tell it.
    """
    shorter = isinstance(found, Stamp) and found.size < stamp.size
    problem = "the file has changed since it was opened"
    remedy: str | None = "open it again; do not write to the data while it is read"
    if shorter:
        problem = "the file is shorter than when it was opened"
    elif isinstance(found, FileNotFoundError):
        problem = "the file is no longer where it was opened"
        if not objects.is_url(path) and not Path(path).is_absolute():
            remedy = f"its path begins at the working directory, now {str(Path.cwd())!r}: open it by its whole path"
    elif isinstance(found, OSError) and not isinstance(found, objects.ChangedObject):
        problem, remedy = "the system does not tell whether the file has changed since it was opened", None
    return ChangedFile(
        problem,
        file=path,
        byte=found.size if shorter and isinstance(found, Stamp) else None,
        expected=stamp,
        found=found,
        remedy=remedy,
    )
