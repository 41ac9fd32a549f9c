"""Detect files that change after they were indexed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from matex_data.errors import DataError, DecodeError


@dataclass(frozen=True)
class Stamp:
    """State of a file when it was indexed.

    Compare stamps only on the rank that took the first of them: inodes differ between the nodes of some file systems,
    and each node sees a change only after its own attribute cache has expired (on NFS, after seconds).

    Parameters
    ----------
    size : bytes.
    mtime_ns : time of the last modification, in nanoseconds since 1970-01-01 UTC.
    inode : inode number; differs for another file of the same name.
    """

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: str) -> Stamp:
        """Return the current state of a file.

        Raises
        ------
        OSError : the file does not exist or is not accessible.
        """
        found = Path(path).stat()
        return cls(found.st_size, found.st_mtime_ns, found.st_ino)

    def __str__(self) -> str:
        second, rest = divmod(self.mtime_ns, 10**9)
        time = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%d %H:%M:%S")
        return f"{self.size} bytes, changed {time}.{rest:09d} UTC, inode {self.inode}"


def check_stamp(path: str, stamp: Stamp | None) -> DataError | None:
    """Return the error to raise if the file at ``path`` has changed since its stamp was taken; None if it has not.

    Call it on the rank that took the stamp (see `Stamp`): rank ``number % size`` for file ``number`` of a data set.
    A file without a stamp counts as unchanged. Files that the file refers to (external and virtual datasets of HDF5)
    are not checked.
    """
    if stamp is None:
        return None
    try:
        found: Stamp | str = Stamp.of(path)
    except OSError as error:
        found = str(error)
    if found == stamp:
        return None
    if isinstance(found, Stamp) and found.size < stamp.size:
        return DecodeError(
            "the file is shorter than when it was opened",
            file=path,
            byte=found.size,
            expected=stamp,
            found=found,
            remedy="open it again; do not write to the data while it is read",
        )
    return DataError(
        "the file has changed since it was opened",
        file=path,
        expected=stamp,
        found=found,
        remedy="open it again; do not write to the data while it is read",
    )
