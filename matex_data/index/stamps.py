"""Whether a file is still the one that was opened."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from matex_data.errors import DataError, DecodeError

if TYPE_CHECKING:
    from matex_data.index.model import FileIndex


@dataclass(frozen=True)
class Stamp:
    """State of a file when it was indexed.

    Two stamps are compared by the rank that made the first of them, and by no other: inodes differ between the nodes of
    some file systems, and each node learns of a change when its own cache of attributes ends (on NFS, after seconds).

    Parameters
    ----------
    size : bytes.
    mtime_ns : time of the last change, nanoseconds since 1970-01-01 UTC.
    inode : number of the file, which another file of the same name does not have.
    """

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: str) -> Stamp:
        """The state of a file now.

        Raises
        ------
        OSError : there is no such file, or it cannot be looked at.
        """
        found = Path(path).stat()
        return cls(found.st_size, found.st_mtime_ns, found.st_ino)

    def __str__(self) -> str:
        second, rest = divmod(self.mtime_ns, 10**9)
        time = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%d %H:%M:%S")
        return f"{self.size} bytes, changed {time}.{rest:09d} UTC, inode {self.inode}"


def changed(file: FileIndex) -> DataError | None:
    """Compare a file with its stamp: the error to raise if it is another one by now, or None.

    Belongs on the rank that indexed the file, see ``Stamp``: rank ``number % size`` for file ``number`` of a data set.
    A file without a stamp counts as unchanged. Files that a file refers to (external and virtual data of HDF5) are not
    looked at.
    """
    if file.stamp is None:
        return None
    try:
        found: Stamp | str = Stamp.of(file.path)
    except OSError as error:
        found = str(error)
    if found == file.stamp:
        return None
    if isinstance(found, Stamp) and found.size < file.stamp.size:
        return DecodeError(
            "the file is shorter than when it was opened",
            file=file.path,
            byte=found.size,
            expected=file.stamp,
            found=found,
            remedy="let nobody write to the data while it is read, and open it again",
        )
    return DataError(
        "the file has changed since it was opened",
        file=file.path,
        expected=file.stamp,
        found=found,
        remedy="open it again; let nobody write to the data while it is read",
    )
