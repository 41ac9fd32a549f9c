"""Objects of stores by their URLs, such as ``s3://bucket/key``: sizes, names, byte ranges. obstore makes the requests.

Credentials and endpoints are those that obstore finds, in environment variables such as ``AWS_ACCESS_KEY_ID``,
``AWS_ENDPOINT_URL`` and ``AWS_SKIP_SIGNATURE``: https://developmentseed.org/obstore/latest/authentication/.
"""

from __future__ import annotations

import errno
import io
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import compress
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import unquote

from matex_data.errors import DataError, install_command
from matex_data.paths import LISTED


class Seekable(io.RawIOBase):
    """Stream for reading that has a size and a position; a subclass reads.

    Parameters
    ----------
    size : bytes.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size, self._position = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, f"position {base + offset}, in front of the first byte")
        self._position = base + offset
        return self._position


class Slices:
    """Bytes of an open file, which are read as they are sliced.

    Parameters
    ----------
    file : open for reading.
    size : of the file, in bytes.

    Examples
    --------
    >>> Slices(io.BytesIO(b"abcdef"), 6)[2:4]
    b'cd'
    """

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, bounds: slice) -> bytes:
        begin, end, _ = bounds.indices(self._size)
        self._file.seek(begin)
        return self._file.read(max(0, end - begin))


STORES = ("s3", "s3a", "gs", "az", "abfs", "abfss")
WEB = ("http", "https")  # whose servers do not list what they have
SCHEMES = (*STORES, *WEB)
SETTINGS = ("AWS_", "AZURE_", "GOOGLE_")  # begins of the environment variables of stores
REQUEST_TIME = timedelta(seconds=60)  # for the answer of one request
RETRY_TIME = timedelta(seconds=180)  # for all attempts at one request
RETRIES = 10
LEAST_BLOCK, MOST_BLOCK = 64 << 10, 1 << 20  # bytes of an object that are read at once where a library reads few
KEPT_BYTES = 64 << 20  # of an object that is open
SIDE_BY_SIDE = 10  # requests for ranges of one call
PAGE = 1000  # names of one answer

_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://([^/]*)/?(.*)", re.DOTALL)
_WILDCARD = re.compile(r"[*?[]")


class ObjectState(NamedTuple):
    """State of an object.

    Parameters
    ----------
    size : bytes.
    changed : time of the last change.
    tag : of its content, as the store names it.
    """

    size: int
    changed: datetime
    tag: str


def is_url(path: str | bytes) -> bool:
    """Return whether a path is a URL.

    >>> is_url("s3://bucket/events.h5"), is_url("data/events.h5")
    (True, False)
    """
    return b"://" in path if isinstance(path, bytes) else "://" in path


def is_web(path: str) -> bool:
    """Return whether a path is a URL of a web server, which does not list what it has.

    >>> is_web("https://example.org/a.h5"), is_web("s3://bucket/a.h5")
    (True, False)
    """
    return is_url(path) and parts(path)[0] in WEB


def check_url(url: str) -> None:
    """Raise ``DataError`` for a URL of another kind, or one with credentials in it, which messages would show."""
    scheme, host, key = parts(url)
    has_password = "@" in host and scheme not in ("abfs", "abfss")  # there a container stands in front of it
    if has_password or (scheme not in STORES and "?" in key):
        raise DataError(
            "a URL with credentials, or with a query, is not read",
            file=f"{scheme}://{host.rpartition('@')[2]}/{key.partition('?')[0]}",
            remedy="set the environment variables of the store, such as AWS_ACCESS_KEY_ID, or AWS_SKIP_SIGNATURE=true",
        )
    if scheme in STORES and has_wildcard(host):
        remedy = "name it: patterns are those of the objects in one bucket; a list may name several"
        raise DataError("the name of the bucket is a pattern", file=url, found=repr(host), remedy=remedy)
    if scheme not in SCHEMES:
        raise DataError(
            "there is no reader of such URLs",
            file=url,
            expected=f"one of {', '.join(f'{name}://' for name in SCHEMES)}",
            found=f"{scheme}://",
            remedy=f"give the path {url.removeprefix('file://')!r}"
            if scheme == "file"
            else "copy the files to a file system that all ranks see",
        )
    _obstore(url)


def state(url: str) -> ObjectState:
    """Ask for the state of an object; raise ``OSError`` if there is none, or the store does not tell."""
    store, key = _located(url)
    if not key.strip("/") and not is_web(url):  # the bucket, of which a store tells the state as well
        raise FileNotFoundError(errno.ENOENT, "there is no such object", url)
    with _as_os_errors(url):
        found = store.head(key)
    return ObjectState(int(found["size"]), found["last_modified"], found["e_tag"] or "")


def read(url: str, most: int | None = None) -> bytes:
    """Read an object, or the first ``most`` bytes of it; raise ``OSError`` if there is none, or it cannot be read."""
    store, key = _located(url)
    with _as_os_errors(url):
        if most is None:
            return bytes(store.get(key).bytes())
        return bytes(store.get_range(key, start=0, length=most))


class ChangedObject(OSError):
    """Error of an object whose content is not the one that was asked for."""


def read_ranges(
    url: str, offset: Sequence[int], nbytes: Sequence[int], gap: int = 0, tag: str = ""
) -> list[memoryview]:
    """Read byte ranges of an object, which are requested side by side; adjacent ones by one request.

    Parameters
    ----------
    offset, nbytes : int[k], first byte and length of each range, ascending.
    gap : bytes between two ranges that one request reads with them.
    tag : of the content that is asked for, as in its state; "": any.

    Returns
    -------
    Bytes of each range; fewer than asked for at the end of the object.

    Raises
    ------
    ChangedObject : it has another content.
    OSError : there is no such object, or it cannot be read.
    """
    if not all(nbytes):  # a request for nothing is an error
        filled = list(compress(offset, nbytes)), list(filter(None, nbytes))
        data = iter(read_ranges(url, *filled, gap, tag) if any(nbytes) else ())
        return [next(data) if count else memoryview(b"") for count in nbytes]
    store, key = _located(url)
    begins, ends, run_of = _coalesced(offset, nbytes, gap)
    match = tag if not tag.startswith("W/") else ""  # which names no bytes

    def read_one(begin: int, end: int) -> memoryview:
        with _as_os_errors(url):
            answer = store.get(key, options={"range": (begin, end), **({"if_match": match} if match else {})})
            if match and (answer.meta["e_tag"] or match) != match:  # of a server that does not look at it
                raise ChangedObject(errno.ESTALE, "the object has changed", url)
            return memoryview(answer.bytes())

    if len(begins) == 1:
        runs = [read_one(*begins, *ends)]
    else:
        with ThreadPoolExecutor(min(len(begins), SIDE_BY_SIDE)) as threads:
            runs = list(threads.map(read_one, begins, ends))
    at = [begin - begins[run] for begin, run in zip(offset, run_of, strict=True)]
    return [runs[run][begin : begin + count] for run, begin, count in zip(run_of, at, nbytes, strict=True)]


def _coalesced(offset: Sequence[int], nbytes: Sequence[int], gap: int) -> tuple[list[int], list[int], list[int]]:
    """Return begin and end of each request for ascending ranges, and the request of each of these.

    >>> _coalesced([0, 10, 100], [10, 10, 5], 4)
    ([0, 100], [20, 105], [0, 0, 1])
    """
    begins, ends, run_of = list[int](), list[int](), list[int]()
    for begin, count in zip(offset, nbytes, strict=True):
        if begins and begin - ends[-1] <= gap:
            ends[-1] = max(ends[-1], begin + count)
        else:
            begins.append(begin)
            ends.append(begin + count)
        run_of.append(len(begins) - 1)
    return begins, ends, run_of


def names_below(url: str) -> Iterator[str]:
    """Yield the names of all objects of a folder, relative to it, a page at a time.

    Raises
    ------
    OSError : the store cannot be listed.
    """
    store, key = _located(url)
    prefix = key.rstrip("/")
    if is_web(url):
        raise OSError(errno.ENOTSUP, "a web server does not list its files: name them, such as run-{000..255}.h5", url)
    with _as_os_errors(url):
        pages = store.list(prefix or None, chunk_size=PAGE)
    while True:
        with _as_os_errors(url):
            page = next(pages, None)
        if page is None:
            return
        names = (entry["path"][len(prefix) :].lstrip("/") for entry in page)
        yield from (name for name in names if name)  # an empty object may stand for the folder itself


def folders_of(url: str) -> list[str]:
    """Return the names of the folders in a folder, sorted; raise ``OSError`` if the store cannot be listed."""
    return sorted(prefix.rstrip("/").rpartition("/")[2] for prefix in _listed(url)["common_prefixes"])


def existing_objects(urls: Sequence[str]) -> set[str]:
    """Return those of the URLs that are objects. A folder that holds many of them is listed once.

    Those of web servers, which do not list what they have, are taken as they are: whoever opens one of them is told.

    Raises
    ------
    OSError : a store cannot be read.
    """
    by_folder: dict[str, list[str]] = {}
    for url in urls:
        if not (is_web(url) and has_wildcard(url)):  # a store may have an object with this name
            by_folder.setdefault(url.rpartition("/")[0], []).append(url)
    found: set[str] = set()
    for folder, of_folder in by_folder.items():
        if is_web(folder):
            found.update(of_folder)
        elif len(of_folder) < LISTED:
            found.update(filter(is_object, of_folder))
        else:
            names = names_in(folder)
            found.update(url for url in of_folder if url.rpartition("/")[2] in names)
    return found


def names_in(folder: str) -> set[str]:
    """Return the names of the objects in a folder, without those of the folders in it.

    Raises
    ------
    OSError : the store cannot be listed.
    """
    return {entry["path"].rpartition("/")[2] for entry in _listed(folder)["objects"]}


def _listed(folder: str) -> Any:
    store, key = _located(folder)
    with _as_os_errors(folder):
        return store.list_with_delimiter(key.rstrip("/") or None)


def is_object(url: str) -> bool:
    """Return whether there is an object of this name."""
    try:
        state(url)
    except FileNotFoundError:
        return False
    return True


def is_folder(url: str) -> bool:
    """Return whether there are objects in a folder of this name; False where they cannot be listed."""
    return not is_web(url) and any(names_below(url))


def matching(url: str) -> tuple[list[str], list[str]]:
    """Return the URLs of the objects, and of the folders, that a pattern with ``*``, ``?``, ``[...]`` and ``**`` fits.

    Raises
    ------
    OSError : the store cannot be listed.
    """
    folder = url[: _WILDCARD.search(url).start()].rpartition("/")[0]  # type: ignore[union-attr]
    words = url[len(folder) + 1 :].rstrip("/").split("/")
    found, folders = list[str](), dict[str, bool]()
    for name in names_below(folder):
        for end in re.finditer("/", name):
            above = name[: end.start()]
            if above not in folders:
                folders[above] = _fits(above.split("/"), words)
        if not url.endswith("/") and _fits(name.split("/"), words):
            found.append(f"{folder}/{name}")
    return found, [f"{folder}/{path}" for path, fits in folders.items() if fits]


def has_wildcard(url: str) -> bool:
    """Return whether a path is a pattern."""
    return _WILDCARD.search(url) is not None


def _fits(names: Sequence[str], words: Sequence[str]) -> bool:
    """Return whether the names of a path fit a pattern; two stars stand for folders, or at its end for anything.

    >>> _fits("run1/a/b/x1.h5".split("/"), "run*/**/x?.h5".split("/"))
    True
    """
    if not words or not names:
        return not words and not names
    if words[0] == "**":
        return len(words) == 1 or any(_fits(names[at:], words[1:]) for at in range(len(names)))
    return fnmatchcase(names[0], words[0]) and _fits(names[1:], words[1:])


class ObjectFile(Seekable):
    """Object that is open for reading, by libraries that read few bytes here and there.

    Blocks are read at once and kept, longer ones where reads follow one another. For one thread at a time, as any open
    file.

    Parameters
    ----------
    url : of the object.

    Raises
    ------
    OSError : there is none, or it cannot be read.
    """

    def __init__(self, url: str) -> None:
        found = state(url)
        super().__init__(found.size)
        self.name, self._tag = url, found.tag
        self._blocks: dict[int, memoryview] = {}

    def readinto(self, buffer: Any) -> int:
        out = memoryview(buffer).cast("B")
        count = max(0, min(len(out), self._size - self._position))
        begin, end = self._position, self._position + count
        if count > MOST_BLOCK:
            out[:count] = self._read(begin, count)
        elif count:
            self._load(begin // LEAST_BLOCK, (end - 1) // LEAST_BLOCK)
            for block in range(begin // LEAST_BLOCK, -(-end // LEAST_BLOCK)):
                first = block * LEAST_BLOCK
                low, high = max(begin, first), min(end, first + LEAST_BLOCK)
                out[low - begin : high - begin] = self._blocks[block][low - first : high - first]
        self._position += count
        return count

    def readall(self) -> bytes:
        """Read all bytes from the position on, by one request."""
        return self.read(self._size - self._position) or b""

    def _load(self, first: int, last: int) -> None:
        """Read the missing ones of neighbouring blocks by one request, and those behind them if it goes on there."""
        missing = [number for number in range(first, last + 1) if number not in self._blocks]
        if not missing:
            return
        before = 0  # blocks in front of them that have been read
        while before < MOST_BLOCK // LEAST_BLOCK - 1 and missing[0] - before - 1 in self._blocks:
            before += 1
        if len(self._blocks) * LEAST_BLOCK > KEPT_BYTES:
            self._blocks.clear()
            missing = list(range(first, last + 1))
        begin = missing[0] * LEAST_BLOCK
        count = max(missing[-1] + 1 - missing[0], before + 1) * LEAST_BLOCK
        data = self._read(begin, min(count, self._size - begin))
        for i in range(-(-len(data) // LEAST_BLOCK)):
            self._blocks[missing[0] + i] = data[i * LEAST_BLOCK : (i + 1) * LEAST_BLOCK]

    def _read(self, begin: int, count: int) -> memoryview:
        (data,) = read_ranges(self.name, [begin], [count], tag=self._tag)
        if len(data) < count:
            raise OSError(errno.EIO, f"the object has become shorter than {self._size} bytes", self.name)
        return data


def parts(url: str) -> tuple[str, str, str]:
    """Return scheme, host or bucket, and key of a URL.

    >>> parts("S3://bucket/runs/1.h5")
    ('s3', 'bucket', 'runs/1.h5')
    """
    found = _URL.fullmatch(url)
    if found is None:
        raise DataError("the URL is malformed", file=url, expected="scheme://bucket/key")
    return found[1].lower(), found[2], found[3]


def _located(url: str) -> tuple[Any, str]:
    """Return the store of a URL, and the key in it."""
    scheme, host, key = parts(url)
    if _process() != os.getpid():
        raise OSError(errno.ENOTSUP, "a process that was forked cannot make requests: start it by 'spawn'", url)
    settings = tuple(sorted(item for item in os.environ.items() if item[0].startswith(SETTINGS)))
    return _store(f"{scheme}://{host}", settings), unquote(key) if scheme in WEB else key


@lru_cache(1)
def _process() -> int:
    """Return the process that made the first request: its threads make all of them, and a forked one has none."""
    return os.getpid()


@lru_cache(64)
def _store(origin: str, settings: tuple[tuple[str, str], ...]) -> Any:
    """Return the store of a bucket or a host, with its connections."""
    obstore = _obstore(origin)
    plain = any(value.startswith("http://") for name, value in settings if "ENDPOINT" in name)
    options: dict[str, Any] = {"timeout": REQUEST_TIME, "connect_timeout": timedelta(seconds=20)}
    if plain or origin.startswith("http://"):
        options["allow_http"] = True
    retry = {"max_retries": RETRIES, "retry_timeout": RETRY_TIME}
    with _as_os_errors(origin):
        return obstore.store.from_url(origin, client_options=options, retry_config=retry)


def _obstore(url: str) -> Any:
    try:
        import obstore
        import obstore.store
    except ImportError as error:
        remedy = install_command("matex_data[remote]")
        raise DataError("reading URLs needs obstore", file=url, found=error, remedy=remedy) from error
    return obstore


@contextmanager
def _as_os_errors(url: str) -> Iterator[None]:
    """Context manager: raise the errors of obstore as those of a file system, without the contents of its requests."""
    from obstore.exceptions import BaseError, PermissionDeniedError, PreconditionError, UnauthenticatedError

    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "there is no such object", url) from error
    except (PermissionDeniedError, UnauthenticatedError) as error:
        remedy = "" if is_web(url) else ": set its environment variables, or AWS_SKIP_SIGNATURE=true if it is public"
        raise PermissionError(errno.EACCES, f"the store does not permit it{remedy}", url) from error
    except PreconditionError as error:
        raise ChangedObject(errno.ESTALE, "the object has changed", url) from error
    except (BaseError, ValueError) as error:
        first = re.sub(r"\?\S*", "?...", str(error).partition("\n")[0].partition(": <?xml")[0])
        if first.endswith("404 Not Found"):
            raise FileNotFoundError(errno.ENOENT, "there is no such bucket", url) from error
        raise OSError(errno.EIO, first, url) from error
