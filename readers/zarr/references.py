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
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from matex_data.declared import declared
from matex_data.errors import FormatError
from matex_data.locks import cached_property
from matex_data.readers.zarr.stores import Extent, Keys, ListedStore, Store, size_of
from matex_data.storage.files import names_in, read_bytes, reading, unreadable
from matex_data.storage.objects import check_url, is_url
from matex_data.storage.trust import NONE, Trust, folder_of, resolved

RESTORE = "write the references again"
MOST_RECORDS = 1 << 24  # references of one Parquet file, which may be missing ones: they take no bytes
_RECORDS = re.compile(r"refs\.(0|[1-9][0-9]{0,17})\.parq$")


@declared
@dataclass(frozen=True)
class JsonReferences(ListedStore):
    """References in a JSON file, of the version 0 or 1.

    Parameters
    ----------
    trust : where the chunks may lie, beside the folder of the references.
    """

    path: str
    trust: Trust = NONE

    def read_keys(self) -> Keys:
        try:
            document = json.loads(read_bytes(self.path))
            refs = document.get("refs", document) if isinstance(document, dict) else None
            if not isinstance(refs, dict) or document.get("gen"):
                found = "references by templates of 'gen'" if isinstance(refs, dict) else type(document).__name__
                raise FormatError(
                    "the references cannot be read", file=self.path, expected="a JSON object", found=found
                )
            templates = {key: str(value) for key, value in (document.get("templates") or {}).items()}
            targets = _Targets(self.path, self.trust)
            return Keys({key: self._entry(value, templates, targets) for key, value in refs.items()})
        except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
            raise FormatError("the references are damaged", file=self.path, found=error, remedy=RESTORE) from error

    def _entry(self, value: Any, templates: Mapping[str, str], targets: _Targets) -> Extent | bytes:
        if isinstance(value, str):
            return base64.b64decode(value[7:]) if value.startswith("base64:") else value.encode()
        if isinstance(value, dict):
            return json.dumps(value).encode()
        path = re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda match: templates[match[1]], value[0])
        return targets.extent(path, *value[1:3])


@declared
@dataclass(frozen=True)
class ParquetReferences(Store):
    """References in a folder of Parquet files, each with a number of chunks of an array.

    Parameters
    ----------
    trust : where the chunks may lie, beside the folder of this folder.
    """

    path: str
    trust: Trust = NONE

    @property
    def folder(self) -> str:
        return self.path

    def get(self, key: str) -> bytes | None:
        document = self._metadata["metadata"].get(key)
        if key == ".zmetadata":
            document = self._metadata
        return None if document is None else json.dumps(document).encode()

    def folders(self, folder: str) -> list[str]:
        return self._documents.folders(folder)

    def extents(self, folder: str) -> Iterator[tuple[str, Extent | bytes]]:
        array = self._metadata["metadata"][f"{folder}/.zarray".lstrip("/")]
        counts = [-(-n // c) for n, c in zip(array["shape"], array["chunks"], strict=True)]
        step, targets = self._metadata["record_size"], _Targets(self.path, self.trust)
        inner = "/".join(filter(None, (self.path, folder)))
        try:
            found = [_RECORDS.match(name) for name in names_in(inner)]
        except OSError as error:
            raise unreadable(inner, error, "the folder") from error
        for number in sorted(int(name[1]) for name in found if name):  # of those that exist, whatever the shape claims
            if number * step < prod(counts):
                yield from self._read(f"{inner}/refs.{number}.parq", number * step, counts, targets)

    def _read(
        self, path: str, first: int, counts: Sequence[int], targets: _Targets
    ) -> Iterator[tuple[str, Extent | bytes]]:
        last = min(first + self._metadata["record_size"], prod(counts))
        try:
            with reading(path), pq.ParquetFile(pa.BufferReader(read_bytes(path))) as file:
                if file.metadata.num_rows > MOST_RECORDS:
                    raise ValueError(f"{file.metadata.num_rows} references in one file")
                for batch in file.iter_batches(columns=["path", "offset", "size", "raw"]):
                    numbers = pa.array(range(first, first + len(batch)))
                    written = batch.append_column("number", numbers).filter(
                        pc.or_(pc.is_valid(batch["path"]), pc.is_valid(batch["raw"]))
                    )
                    for row in written.to_pylist():
                        if row["number"] < last:
                            position = np.unravel_index(row["number"], counts) if counts else ()
                            yield ".".join(map(str, position)) or "0", targets.entry(row)
                    first += len(batch)
        except (ValueError, TypeError, KeyError) as error:
            raise FormatError("the references are damaged", file=path, found=error, remedy=RESTORE) from error

    @cached_property
    def _documents(self) -> Keys:
        return Keys(dict.fromkeys(self._metadata["metadata"], b""))

    @cached_property
    def _metadata(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(read_bytes(f"{self.path}/.zmetadata"))
        return found


def parquet_references(path: str, trust: Trust = NONE) -> ParquetReferences | None:
    """Return the references of a folder; None if it is a store of another kind.

    Parameters
    ----------
    trust : where the chunks may lie, beside the folder of this folder.
    """
    path = path.rstrip("/")
    try:
        document = json.loads(read_bytes(f"{path}/.zmetadata"))
    except (OSError, ValueError):
        return None
    is_table = isinstance(document, dict) and type(document.get("record_size")) is int and document["record_size"] > 0
    return ParquetReferences(path, trust) if is_table and isinstance(document.get("metadata"), dict) else None


class _Targets:
    """Files to which references lead, each of which is asked for once.

    Parameters
    ----------
    references : path of the references, in whose folder relative paths begin.
    trust : where the files may lie beside that folder.
    """

    def __init__(self, references: str, trust: Trust) -> None:
        self._references, self._trust = references, trust.beside(references)
        self._paths: dict[str, str] = {}

    def extent(self, url: str, offset: Any = 0, nbytes: Any = None) -> Extent:
        """Return the byte range of a reference.

        Parameters
        ----------
        url : of the file, or its path.
        nbytes : None: the whole file.

        Raises
        ------
        DataError : the file is not trusted.
        """
        path = self._paths.get(url) or self._path(url)
        return Extent(path, int(offset), int(nbytes) if nbytes is not None else size_of(path))

    def entry(self, row: Mapping[str, Any]) -> Extent | bytes:
        """Return what a row of a table refers to; see `extent`."""
        if row["raw"] is not None:
            return bytes(row["raw"])
        return self.extent(row["path"], *((row["offset"], row["size"]) if row["size"] else ()))

    def _path(self, url: str) -> str:
        path = resolved(folder_of(self._references), url)
        self._trust.check(path, self._references)
        if is_url(path):
            check_url(path)
        self._paths[url] = path
        return path
