"""Open files of the system, and objects of stores, in the same way."""

from __future__ import annotations

import errno
import io
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from matex_data._types import Bytes
from matex_data.errors import RESTORE, DataError
from matex_data.paths import leads_nowhere
from matex_data.storage import objects

AHEAD_BYTES = 8 << 20  # of an object that is read from its begin to its end


def open_binary(path: str) -> BinaryIO:
    """Open a file, or an object of a store by its URL, for reading.

    Raises
    ------
    OSError : there is none, or it cannot be read.

    Examples
    --------
    >>> size = Path("events.bin").write_bytes(b"magic and more")
    >>> with open_binary("events.bin") as file:
    ...     file.read(5)
    b'magic'
    """
    if objects.is_url(path):
        return cast(BinaryIO, objects.ObjectFile(path))
    return Path(path).open("rb")


def open_sequential(path: str) -> BinaryIO:
    """Open a file or an object that is read by lines, or in few bytes at a time, from its begin to its end.

    Raises
    ------
    OSError : there is none, or it cannot be read.
    """
    if objects.is_url(path):
        return io.BufferedReader(objects.ObjectFile(path), AHEAD_BYTES)
    return Path(path).open("rb")


def open_whole(path: str) -> BinaryIO:
    """Open a file, or an object with all of its bytes in memory, for a library that reads them more than once.

    Raises
    ------
    OSError : there is none, or it cannot be read.
    """
    return io.BytesIO(objects.read(path)) if objects.is_url(path) else Path(path).open("rb")


def read_into(path: str, offset: int, memory: Bytes) -> int:
    """Fill memory with the bytes of a file or an object from ``offset`` on, and return how many there are.

    Raises
    ------
    OSError : there is no such file or object, or it cannot be read.
    """
    if not len(memory):
        return 0
    if objects.is_url(path):
        (data,) = objects.read_ranges(path, [offset], [len(memory)])
        memory.data[: len(data)] = data
        return len(data)
    with Path(path).open("rb") as file:
        file.seek(offset)
        return file.readinto(memory.data)


def open_zip(file: BinaryIO) -> zipfile.ZipFile:
    """Open a zip file in an open file.

    Raises
    ------
    zipfile.BadZipFile : it is damaged.
    OSError : it cannot be read, which `zipfile` does not tell from damage.
    """
    try:
        return zipfile.ZipFile(file)
    except zipfile.BadZipFile as error:
        cause = error.__context__
        if isinstance(cause, OSError) and is_of_system(cause):
            raise cause from None
        raise


def is_of_system(error: Exception) -> bool:
    """Return whether the system or a store has raised an error, and no library that has found damage.

    Damage leads libraries to positions in front of the file as well, which the system calls invalid.

    >>> is_of_system(FileNotFoundError(2, "no such file")), is_of_system(OSError("corrupt file"))
    (True, False)
    """
    return isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Context manager: raise ``DataError``, which names the file, for what the system says while it is read.

    >>> with reading("nowhere.csv"):
    ...     open("nowhere.csv")
    Traceback (most recent call last):
    matex_data.errors.DataError: the file cannot be read (file 'nowhere.csv')
      found: [Errno 2] No such file or directory: 'nowhere.csv'
      remedy: check the path, which has to lead there on all machines of the job
    """
    try:
        yield
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: str, error: Exception, what: str = "the file", **where: Any) -> DataError:
    """Return the error of something that the system, or a store, does not let this process read.

    Parameters
    ----------
    path : of a file or a folder, or a URL.
    error : of the system; of a store, or of MPI.
    what : is at the path.
    where : ``field`` and ``row``.

    Raises
    ------
    DataError : the path is a link that leads to no file.
    """
    check_link(path)
    number = error.errno if isinstance(error, OSError) else None
    remedy = _REMEDIES.get(number, "try again: the file system may be overloaded")
    if objects.is_url(path):
        remedy = "check the URL, and the variables of the store: docs/guides/stores.md"
    return DataError(f"{what} cannot be read", file=path, found=error, remedy=remedy, **where)


_REMEDIES: dict[int | None, str] = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), "check the permissions of it and of the folders above it: ls -ld"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "allow more open files: ulimit -n"),
    **dict.fromkeys(
        (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG),
        "check the path, which has to lead there on all machines of the job",
    ),
}
"""By numbers of errors of the system."""


def undecodable(kind: type[DataError], problem: str, path: str, error: Exception, **where: Any) -> DataError:
    """Return the error of a file that a library cannot decode; that of the system, if it has raised this error.

    Parameters
    ----------
    kind, problem : of the error of a damaged file.
    where : ``field`` and ``row``; ``expected``, ``found`` and ``remedy`` of a damaged file.

    Raises
    ------
    MemoryError : it is one, which tells of no damage.
    """
    if isinstance(error, MemoryError):
        raise error
    if is_of_system(error):
        return unreadable(path, error, **{name: where[name] for name in ("field", "row") if name in where})
    found = error if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
    return kind(problem, file=path, **{"found": found, "remedy": RESTORE, **where})


@contextmanager
def reading_if_present(path: str) -> Iterator[None]:
    """Context manager, like `reading`: leave the block without an error where there is no such file or object.

    >>> with reading_if_present("nowhere.csv"):
    ...     open("nowhere.csv")
    """
    with reading(path):
        try:
            yield
        except FileNotFoundError:
            check_link(path)


def check_link(path: str) -> None:
    """Raise ``DataError`` for a link that leads to no file: the data exist, but not here.

    What is left out without a file, such as a chunk of Zarr, or a file of a folder, must not be left out for this.
    """
    if not leads_nowhere(path):
        return
    target = str(Path(path).readlink())
    is_annexed = "annex/objects/" in target
    remedy = "git annex get, or datalad get" if is_annexed else "restore the file, or remove the link"
    try:
        Path(path).stat()
    except OSError as error:
        found = f"{target}: {error.strerror}"
        raise DataError("a link leads to no file", file=path, expected="a file", found=found, remedy=remedy) from error


def read_bytes(path: str) -> bytes:
    """Read a file, or an object of a store by its URL; raise ``OSError`` if that is not possible.

    Examples
    --------
    >>> size = Path("events.bin").write_bytes(b"magic and more")
    >>> read_bytes("events.bin")
    b'magic and more'
    """
    return objects.read(path) if objects.is_url(path) else Path(path).read_bytes()


def size_of(path: str) -> int:
    """Return the size of a file, or of an object of a store by its URL, in bytes; raise ``OSError`` if there is none.

    Examples
    --------
    >>> size = Path("events.bin").write_bytes(b"magic and more")
    >>> size_of("events.bin")
    14
    """
    return objects.state(path).size if objects.is_url(path) else Path(path).stat().st_size


def allocated_size(path: str) -> int:
    """Return the bytes that a file takes from the disk, which are fewer than its size if it has holes."""
    if objects.is_url(path):
        return size_of(path)
    status = Path(path).stat()
    return status.st_blocks * 512 or status.st_size


def size_of_open(file: IO[bytes]) -> int:
    """Return the size of an open file in bytes; its position stays."""
    position = file.tell()
    try:
        return file.seek(0, os.SEEK_END)
    finally:
        file.seek(position)


def exists(path: str) -> bool:
    """Return whether there is such a file or folder, or such an object."""
    return objects.is_object(path) if objects.is_url(path) else Path(path).exists()


def is_folder(path: str) -> bool:
    """Return whether a path is a folder; of a store, whether there are objects below it."""
    return objects.is_folder(path) if objects.is_url(path) else Path(path).is_dir()


def names_in(path: str) -> set[str]:
    """Return the names of the files in a folder, or of the objects; none if there is no such folder.

    Raises
    ------
    OSError : the folder cannot be listed.

    Examples
    --------
    >>> names_in("no such folder")
    set()
    """
    if objects.is_url(path):
        return objects.names_in(path)
    return {entry.name for entry in Path(path).iterdir()} if Path(path).is_dir() else set()
