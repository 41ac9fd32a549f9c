"""References of kerchunk: a Zarr store whose chunks are byte ranges of other files, in JSON or in Parquet.

https://fsspec.github.io/kerchunk/spec.html
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

from matex_data.declared import declared
from matex_data.errors import DataError, FormatError
from matex_data.locks import cached_property
from matex_data.readers.zarr.stores import Extent, Store, read, size_of
from matex_data.storage.files import exists, read_bytes
from matex_data.storage.objects import check_url, is_url

RESTORE = "write the references again"


@declared
@dataclass(frozen=True)
class JsonReferences(Store):
    """References in a JSON file, of the version 0 or 1."""

    path: str

    def get(self, key: str) -> bytes | None:
        return _value(self._entries.get(key))

    def folders(self, folder: str) -> list[str]:
        return _folders(self._entries, folder)

    def extents(self, folder: str) -> Iterator[tuple[str, Extent | bytes]]:
        prefix = f"{folder}/" if folder else ""
        found = self._entries.items()
        return ((key.removeprefix(prefix), entry) for key, entry in found if key.startswith(prefix))

    @cached_property
    def _entries(self) -> dict[str, Extent | bytes]:
        try:
            document = json.loads(read_bytes(self.path))
            refs = document.get("refs", document) if isinstance(document, dict) else None
            if not isinstance(refs, dict) or document.get("gen"):
                found = "references by templates of 'gen'" if isinstance(refs, dict) else type(document).__name__
                raise FormatError(
                    "the references cannot be read", file=self.path, expected="a JSON object", found=found
                )
            templates = {key: str(value) for key, value in (document.get("templates") or {}).items()}
            return {key: self._entry(value, templates) for key, value in refs.items()}
        except OSError as error:
            raise DataError("the file cannot be read", file=self.path, found=error) from error
        except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
            raise FormatError("the references are damaged", file=self.path, found=error, remedy=RESTORE) from error

    def _entry(self, value: Any, templates: Mapping[str, str]) -> Extent | bytes:
        if isinstance(value, str):
            return base64.b64decode(value[7:]) if value.startswith("base64:") else value.encode()
        if isinstance(value, dict):
            return json.dumps(value).encode()
        path = re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda match: templates[match[1]], value[0])
        return _extent(self.path, path, *value[1:3])


@declared
@dataclass(frozen=True)
class ParquetReferences(Store):
    """References in a folder of Parquet files, each with a number of chunks of an array."""

    path: str

    def get(self, key: str) -> bytes | None:
        document = self._metadata["metadata"].get(key)
        if key == ".zmetadata":
            document = self._metadata
        return None if document is None else json.dumps(document).encode()

    def folders(self, folder: str) -> list[str]:
        return _folders(self._metadata["metadata"], folder)

    def extents(self, folder: str) -> Iterator[tuple[str, Extent | bytes]]:
        array = self._metadata["metadata"][f"{folder}/.zarray".lstrip("/")]
        counts = [-(-n // c) for n, c in zip(array["shape"], array["chunks"], strict=True)]
        step = self._metadata["record_size"]
        for first in range(0, prod(counts), step):
            path = "/".join(filter(None, (self.path, folder, f"refs.{first // step}.parq")))
            if exists(path):
                yield from self._read(path, first, counts)

    def _read(self, path: str, first: int, counts: Sequence[int]) -> Iterator[tuple[str, Extent | bytes]]:
        try:
            columns = pq.read_table(pa.BufferReader(read_bytes(path))).to_pydict()
            rows = zip(*(columns[name] for name in ("path", "offset", "size", "raw")), strict=True)
            for number, (file, offset, size, raw) in enumerate(rows, first):
                if number < prod(counts) and (raw is not None or file is not None):
                    entry = raw if raw is not None else _extent(self.path, file, *((offset, size) if size else ()))
                    yield ".".join(map(str, _position(number, counts))) or "0", entry
        except OSError as error:
            raise DataError("the file cannot be read", file=path, found=error) from error
        except (ValueError, TypeError, KeyError) as error:
            raise FormatError("the references are damaged", file=path, found=error, remedy=RESTORE) from error

    @cached_property
    def _metadata(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(read_bytes(f"{self.path}/.zmetadata"))
        return found


def parquet_references(path: str) -> ParquetReferences | None:
    """Return the references of a folder; None if it is a store of another kind."""
    try:
        document = json.loads(read_bytes(f"{path.rstrip('/')}/.zmetadata"))
    except (OSError, ValueError):
        return None
    is_table = isinstance(document, dict) and type(document.get("record_size")) is int and document["record_size"] > 0
    return ParquetReferences(path) if is_table and isinstance(document.get("metadata"), dict) else None


def _value(entry: Extent | bytes | None) -> bytes | None:
    if entry is None or isinstance(entry, bytes):
        return entry
    data = read(entry)
    return None if data is None else data.tobytes()


def _folders(keys: Mapping[str, Any], folder: str) -> list[str]:
    prefix = f"{folder}/" if folder else ""
    inner = (key[len(prefix) :] for key in keys if key.startswith(prefix))
    return sorted({name.partition("/")[0] for name in inner if "/" in name})


def _extent(references: str, url: str, offset: Any = 0, nbytes: Any = None) -> Extent:
    """Return the byte range of a reference.

    Parameters
    ----------
    references : path of the references: a relative path begins in their folder, or in the working directory.
    nbytes : None: the whole file.

    Raises
    ------
    FormatError : the file is not local.
    """
    path = _located(references, url)
    return Extent(path, int(offset), int(nbytes) if nbytes is not None else size_of(path))


def _located(references: str, url: str) -> str:
    """Return the path, or the URL, that a reference leads to."""
    scheme = urlsplit(url).scheme
    if scheme not in ("", "file", "local"):
        check_url(url)
        return url
    path = unquote(url.partition("://")[2]) if scheme else url
    if is_url(references) and not path.startswith("/"):
        return f"{references.rpartition('/')[0]}/{path}"
    beside = Path(references).parent / path
    return str(beside) if beside.exists() else path


def _position(number: int, counts: Sequence[int]) -> list[int]:
    position: list[int] = []
    for count in reversed(counts):
        number, at = divmod(number, count)
        position.insert(0, at)
    return position
