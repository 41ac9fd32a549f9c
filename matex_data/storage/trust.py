"""``Trust``: where the bytes of a data set may come from beside the files that the user names. Nobody else decides.

Files name others: HDF5 by external raw data, virtual sources and links, Zarr by the names of its arrays, kerchunk and
Icechunk by references, tables of images by their URLs. A reader asks before it looks at any of them.
"""

from __future__ import annotations

import ipaddress
import os
import posixpath
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import unquote

from matex_data.declared import declared
from matex_data.errors import DataError
from matex_data.locks import cached_property
from matex_data.storage.objects import WEB, is_url, parts

VARIABLE = "MATEX_TRUSTED"
LOCAL = ("file://", "local://")
NO_BASE = "relative names begin at the folder of the file that has them, and not at the working directory"
_SAME = {"s3a": "s3", "abfs": "abfss"}  # schemes that name the same objects
_PORTS = {"http": ":80", "https": ":443"}
_MOST_NAMED = 4  # trees in an error
_SIGNATURE = b"\x89HDF\r\n\x1a\n"  # at byte 0, 512, 1024, 2048 and so on


@declared
@dataclass(frozen=True)
class Trust:
    """Folders and URLs from which a data set may take bytes.

    Local paths are compared after all symbolic links are followed. Of the file that asks, the folder that the user
    named and the one in which the file really lies are trusted, since folders of links to files are common.

    Parameters
    ----------
    trees : folders, without symbolic links, and URLs without a slash at the end. All that lies below them is trusted.
    files : files that ask, with the trees of their folders.

    Examples
    --------
    >>> trust = Trust.of(["/sdf/data", "s3://bucket/runs"])
    >>> trust.allows("/sdf/data/run1/raw.bin"), trust.allows("/sdf/data/../home/key"), trust.allows("s3://bucket/other")
    (True, False, False)
    """

    trees: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    @classmethod
    def of(cls, named: Iterable[str | os.PathLike[str]]) -> Trust:
        """Return the trust in folders, files and URLs that the user names.

        Raises
        ------
        DataError : one is empty, or a URL without a host.

        Examples
        --------
        >>> Trust.of(["/sdf/data/", "S3A://bucket/runs/"]).trees
        ('/sdf/data', 's3://bucket/runs')
        """
        return cls(tuple(dict.fromkeys(_tree(os.fspath(name)) for name in named)))

    @classmethod
    def of_site(cls) -> Trust:
        """Return the trust in what the environment variable ``MATEX_TRUSTED`` names, separated by commas.

        Examples
        --------
        >>> before = os.environ.get("MATEX_TRUSTED", "")
        >>> os.environ["MATEX_TRUSTED"] = "/sdf/data,s3://bucket"
        >>> Trust.of_site().trees
        ('/sdf/data', 's3://bucket')
        >>> os.environ["MATEX_TRUSTED"] = before
        """
        return cls.of(name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip())

    def __or__(self, other: Trust) -> Trust:
        """Return the trust in all that one of the two trusts."""
        trees, files = (*self.trees, *other.trees), (*self.files, *other.files)
        return Trust(tuple(dict.fromkeys(trees)), tuple(dict.fromkeys(files)))

    def beside(self, path: str) -> Trust:
        """Return the trust that a file has: also in the tree of its own folder.

        Examples
        --------
        >>> Trust().beside("s3://bucket/runs/run1.json").allows("s3://bucket/runs/raw/1.nc")
        True
        """
        return self | Trust(files=(path,))

    def allows(self, target: str) -> bool:
        """Return whether bytes may come from a file or a URL.

        Examples
        --------
        >>> Trust.of(["http://127.0.0.1:8000"]).allows("http://127.0.0.1:9000/x")
        False
        """
        if is_url(target):
            found, folders = _normal(target), unquote(parts(target)[2]).replace("\\", "/").split("/")
            return ".." not in folders and any(is_url(tree) and _is_below(found, tree) for tree in self._all)
        found = os.path.realpath(target)
        return any(not is_url(tree) and _is_below(found, tree) for tree in self._all)

    def check(self, target: str, file: str, field: str | None = None) -> None:
        """Raise ``DataError`` unless a file may take bytes from another one.

        Parameters
        ----------
        target : path or URL of the other one.
        file, field : that name it.

        Examples
        --------
        >>> Trust().check("/etc/passwd", "/data/run.h5")
        Traceback (most recent call last):
        ...
        matex_data.errors.DataError: the file leads to another one that is not trusted (file '/data/run.h5')
          expected: a file below /data
          found: '/etc/passwd'
          remedy: if its bytes may be read: open_dataset(..., trusted=['/etc']), or MATEX_TRUSTED=/etc
        """
        if not self.allows(target):
            raise self.beside(file)._error(target, file, field)
        _check_kind(target, file, field)

    def check_hdf5(self, target: str, file: str, field: str | None = None) -> None:
        """Raise ``DataError`` unless an HDF5 file may lead to another one: any local HDF5 file, else as of ``check``.

        Where there is no such file, whoever opens it says so.

        Examples
        --------
        >>> Trust().check_hdf5("/data/other.h5", "/home/run.h5")
        """
        if is_url(target) or (_exists(target) and not is_hdf5(target)):
            self.check(target, file, field)

    @cached_property
    def _all(self) -> tuple[str, ...]:
        """Trees, and those of the files: the folder of the name, and that of the file itself."""
        own = (tree for file in self.files for tree in _own_trees(file))
        return tuple(dict.fromkeys((*self.trees, *own)))

    def _error(self, target: str, file: str, field: str | None) -> DataError:
        tree = _folder_of_url(target) if is_url(target) else os.path.dirname(os.path.realpath(target))  # noqa: PTH120
        kind, own = _private(target), " or ".join(self._all[:_MOST_NAMED]) or "that of a folder"
        return DataError(
            "the file leads to another one that is not trusted",
            file=file,
            field=field,
            expected=f"a file below {own}",
            found=f"{target!r}{kind and f', a {kind} host, which has to be named itself'}",
            remedy=f"if its bytes may be read: open_dataset(..., trusted=[{tree!r}]), or {VARIABLE}={tree}",
        )


NONE = Trust()


def resolved(folder: str, name: str) -> str:
    """Return the path or URL of a file that another one names relative to a folder, or as a whole.

    Examples
    --------
    >>> resolved("s3://bucket/tables", "../images/1.png"), resolved("data", "/images/1.png"), resolved("data", "file:///a%20b")
    ('s3://bucket/images/1.png', '/images/1.png', '/a b')
    """
    if name.startswith(LOCAL):
        return resolved(folder, unquote(name.partition("://")[2]))
    if is_url(name) or name.startswith("/"):
        return name
    if not is_url(folder) or ".." not in name:
        return posixpath.join(folder, name)
    scheme, host, key = parts(folder)
    return f"{scheme}://{host}/{posixpath.normpath(f'/{key}/{name}').lstrip('/')}"


def folder_of(path: str) -> str:
    """Return the folder of a file, or of an object.

    Examples
    --------
    >>> folder_of("s3://bucket/runs/1.json"), folder_of("1.json")
    ('s3://bucket/runs', '.')
    """
    return path.rpartition("/")[0] if is_url(path) else posixpath.dirname(path) or "."


def trees_of(targets: Iterable[str], file: str) -> list[str]:
    """Return what ``trusted=`` has to name for a file that leads to others: nothing for those in its own tree.

    Examples
    --------
    >>> trees_of(["/data/a/1.nc", "/data/b/2.nc", "/data/b/3.nc", "/home/x.nc"], "/data/b/refs.json")
    ['/data/a', '/home']
    """
    own = Trust().beside(file)
    return sorted({folder_of(target) for target in dict.fromkeys(targets) if not own.allows(target)})


def is_hdf5(path: str) -> bool:
    """Return whether a path is a regular file with the signature of HDF5, which may stand behind a user block.

    Examples
    --------
    >>> is_hdf5("events.h5"), is_hdf5("/dev/zero")
    (True, False)
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116 (a pipe is not to be opened)
            return False
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123
            begin, size = 0, os.fstat(file.fileno()).st_size
            while begin < size:
                if os.pread(file.fileno(), len(_SIGNATURE), begin) == _SIGNATURE:
                    return True
                begin = max(512, 2 * begin)
    except (OSError, ValueError):
        pass
    return False


def _tree(name: str) -> str:
    """Return a folder without symbolic links, or a URL in the form in which URLs are compared."""
    if name.startswith(LOCAL):
        name = unquote(name.partition("://")[2])
    if not name or (is_url(name) and not parts(name)[1]):
        remedy = 'name folders and URLs: trusted=["/sdf/data", "s3://bucket"]'
        raise DataError("this cannot be trusted", expected="a folder, or a URL with a host", found=name, remedy=remedy)
    return _normal(name) if is_url(name) else os.path.realpath(name)


def _folder_of_url(url: str) -> str:
    """Return the folder of an object, as far as the host or the bucket."""
    scheme, host, key = parts(_normal(url))
    return f"{scheme}://{host}/{posixpath.dirname(key)}".rstrip("/")


def _own_trees(file: str) -> tuple[str, ...]:
    """Return the trees of a file. The root folder is none: all files of the machine would be in it."""
    if is_url(file):
        return (_normal(folder_of(file)),)
    real = os.path.realpath(folder_of(file)), os.path.dirname(os.path.realpath(file))  # noqa: PTH120
    return tuple(tree for tree in real if tree != os.sep)


def _normal(url: str) -> str:
    """Return a URL with scheme and host as they are compared, and its path without a slash at the end."""
    scheme, host, key = parts(url)
    host = host.lower() if scheme in WEB else host
    key = unquote(key) if scheme in WEB else key
    return f"{_SAME.get(scheme, scheme)}://{host.removesuffix(_PORTS.get(scheme, ':'))}/{key}".rstrip("/")


def _is_below(path: str, tree: str) -> bool:
    return path == tree or path.startswith(tree if tree == os.sep else f"{tree}/")


def _private(target: str) -> str:
    """Return "loopback", "link-local" or "private" for a URL of such a host, else nothing."""
    if not is_url(target) or parts(target)[0] not in WEB:
        return ""
    host = parts(target)[1].rpartition("@")[2]
    host = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if host.lower() == "localhost" or host.lower().endswith(".localhost"):
        return "loopback"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return ""
    kinds = {"loopback": address.is_loopback, "link-local": address.is_link_local, "private": address.is_private}
    return next((kind for kind, fits in kinds.items() if fits), "")


def _exists(path: str) -> bool:
    try:
        return os.path.lexists(path)
    except ValueError:  # a null character in it
        return False


def _check_kind(target: str, file: str, field: str | None) -> None:
    """Raise ``DataError`` for a pipe or a device, which may give bytes without end, or none for ever."""
    try:
        mode = 0 if is_url(target) else os.stat(target).st_mode  # noqa: PTH116
    except (OSError, ValueError):
        return  # whoever opens it says why
    if mode and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        problem = "the file leads to a pipe or a device"
        raise DataError(problem, file=file, field=field, expected="a file", found=repr(target))
