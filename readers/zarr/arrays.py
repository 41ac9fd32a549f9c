"""Metadata of arrays: shape, chunks, codecs and names of the axes.

https://zarr-specs.readthedocs.io/en/latest/v2/v2.0.html and .../v3/core/index.html
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from matex_data.declared import declared
from matex_data.readers.catalogue import Unreadable
from matex_data.readers.dimensions.cf import NAT
from matex_data.readers.zarr.codecs import problem

MAX_CHUNK_ITEMS = 1 << 40
TEXT = np.dtype(object)
"""Dtype of texts of variable length, which are byte strings in UTF-8."""
_TEXT_CODECS = ("vlen-utf8", "vlen-bytes")
_TYPES = {"bool": "?", "float16": "f2", "float32": "f4", "float64": "f8", "complex64": "c8", "complex128": "c16"}
_TYPES |= {f"{kind}{8 * n}": f"{kind[0]}{n}" for kind in ("int", "uint") for n in (1, 2, 4, 8)}
_COMPRESSORS = {
    "blosc": {"typesize", "cname", "clevel", "shuffle", "blocksize"},
    "zstd": {"level", "checksum"},
    "gzip": {"level"},
}
"""Options of the codecs of version 3 whose encoded data have all that decoding needs."""
_TIMES = {"numpy.datetime64": "M", "numpy.timedelta64": "m"}
_UNITS = {"W": "weeks", "D": "days", "h": "hours", "m": "minutes", "s": "seconds"}
_UNITS |= {"ms": "milliseconds", "us": "microseconds", "μs": "microseconds", "ns": "nanoseconds"}
DIMENSIONS = "_ARRAY_DIMENSIONS"  # attribute of version 2, by which xarray names the axes


@declared
@dataclass(frozen=True)
class Sharding:
    """Chunks in shards.

    Parameters
    ----------
    counts : chunks of a shard along each axis.
    index_at_end, has_checksum : of the index of a shard.
    """

    counts: tuple[int, ...]
    index_at_end: bool = True
    has_checksum: bool = True


@declared
@dataclass(frozen=True)
class ArrayMetadata:
    """Metadata of an array.

    Parameters
    ----------
    shape, chunk_shape : of the array, and of a chunk: within a shard, if chunks are in shards.
    dtype : as stored; `TEXT`, or a dtype of numbers, byte strings or texts of fixed length.
    fill : value of elements that were never written, in native byte order.
    codecs : configurations of numcodecs as JSON, in the order of encoding.
    order : axes of the array in the order in which a chunk stores them.
    prefix, separator : of the keys of the chunks.
    shards : None: each chunk has a key.
    dimensions : names of the axes; "": an axis has none.
    attributes : numbers, lists and texts.
    """

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fill: Any
    codecs: tuple[str, ...]
    order: tuple[int, ...]
    prefix: str
    separator: str
    shards: Sharding | None
    dimensions: tuple[str, ...]
    attributes: Mapping[str, Any]


def parse(document: Mapping[str, Any]) -> ArrayMetadata:
    """Return the metadata of an array.

    Parameters
    ----------
    document : ``zarr.json``, or ``.zarray`` with the content of ``.zattrs`` as its entry ``attributes``.

    Raises
    ------
    Unreadable : it has a type, a codec or a grid that is not read.
    KeyError, TypeError, ValueError, AttributeError, OverflowError, struct.error : the document is damaged.
    """
    found = _version_3(document) if document.get("zarr_format") == 3 else _version_2(document)
    if len(found.shape) != len(found.chunk_shape) or 0 in found.chunk_shape or prod(found.shape) >= 1 << 62:
        raise ValueError(f"chunks of shape {found.chunk_shape} of an array of shape {found.shape}")
    if prod(found.chunk_shape) > MAX_CHUNK_ITEMS or sorted(found.order) != list(range(len(found.shape))):
        raise ValueError(f"chunks of shape {found.chunk_shape} with axes in the order {found.order}")
    if len(found.dimensions) != len(found.shape) or not all(isinstance(name, str) for name in found.dimensions):
        raise ValueError(f"the names {found.dimensions} of {len(found.shape)} axes")
    if found.separator not in (".", "/"):
        raise ValueError(f"the separator {found.separator!r}")
    texts = [json.loads(codec)["id"] in _TEXT_CODECS for codec in found.codecs]
    if any(texts[1:]) or (found.dtype == TEXT) != (texts[:1] == [True]):
        raise Unreadable("objects of another kind than texts")
    for codec in found.codecs:
        if (reason := problem(codec)) is not None:
            raise Unreadable(reason)
    return found


def _version_2(document: Mapping[str, Any]) -> ArrayMetadata:
    shape, chunk_shape = _lengths(document["shape"]), _lengths(document["chunks"])
    code, of_times = _counted(document["dtype"])
    dtype = TEXT if code == "|O" else _dtype(code, document["dtype"])
    attributes = {**(document.get("attributes") or {}), **of_times}
    names = attributes.pop(DIMENSIONS, None)
    fill = _fill(document.get("fill_value"), dtype)
    if names is not None and document.get("fill_value") is not None and dtype.kind in "iuf" and not of_times:
        attributes.setdefault("_FillValue", fill)  # xarray's convention
    compressor = document.get("compressor")
    codecs = [*(document.get("filters") or []), *([compressor] if compressor else [])]
    axes = tuple(range(len(shape)))
    return ArrayMetadata(
        shape=shape,
        chunk_shape=chunk_shape,
        dtype=dtype,
        fill=fill,
        codecs=tuple(json.dumps(dict(codec), sort_keys=True) for codec in codecs),
        order=axes[::-1] if document.get("order") == "F" else axes,
        prefix="",
        separator=document.get("dimension_separator") or ".",
        shards=None,
        dimensions=_names(names, len(shape)),
        attributes=_decoded(attributes, dtype),
    )


def _version_3(document: Mapping[str, Any]) -> ArrayMetadata:
    shape = _lengths(document["shape"])
    grid, keys = document["chunk_grid"], _named(document["chunk_key_encoding"])
    if grid["name"] != "regular" or keys["name"] not in ("default", "v2"):
        raise Unreadable(f"chunks in a grid {grid['name']!r} under keys {keys['name']!r}")
    chunk_shape, shards = _lengths(grid["configuration"]["chunk_shape"]), None
    codecs = [_named(codec) for codec in document["codecs"]]
    if any(codec["name"] == "sharding_indexed" for codec in codecs):
        shards, chunk_shape, codecs = _sharding(codecs, chunk_shape)
    kind, of_times = _counted(document["data_type"])
    dtype, order, stages = _stages(codecs, _type(kind), len(shape))
    is_default = keys["name"] == "default"
    attributes = {**(document.get("attributes") or {}), **of_times}
    names = document.get("dimension_names") or attributes.pop(DIMENSIONS, None)
    return ArrayMetadata(
        shape=shape,
        chunk_shape=chunk_shape,
        dtype=dtype,
        fill=_fill(document.get("fill_value"), dtype),
        codecs=tuple(stages),
        order=order,
        prefix="c" if is_default else "",
        separator=(keys.get("configuration") or {}).get("separator", "/" if is_default else "."),
        shards=shards,
        dimensions=_names(names, len(shape)),
        attributes=_decoded(attributes, dtype),
    )


def _sharding(
    codecs: Sequence[Mapping[str, Any]], shard_shape: tuple[int, ...]
) -> tuple[Sharding, tuple[int, ...], list[Mapping[str, Any]]]:
    """Return the shards, the shape of a chunk in them, and its codecs.

    https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/index.html
    """
    if len(codecs) > 1:
        raise Unreadable("shards that are encoded as a whole")
    sharding = codecs[0]["configuration"]
    chunk_shape = _lengths(sharding["chunk_shape"])
    index = [_named(codec)["name"] for codec in sharding["index_codecs"]]
    if index not in (["bytes"], ["bytes", "crc32c"]):
        raise Unreadable(f"shards with an index by {index}")
    pairs = list(zip(shard_shape, chunk_shape, strict=True))
    if any(0 in pair or pair[0] % pair[1] for pair in pairs):
        raise ValueError(f"chunks of shape {chunk_shape} in shards of shape {shard_shape}")
    counts = tuple(whole // part for whole, part in pairs)
    shards = Sharding(counts, sharding.get("index_location", "end") == "end", "crc32c" in index)
    return shards, chunk_shape, [_named(codec) for codec in sharding["codecs"]]


def _stages(
    codecs: Sequence[Mapping[str, Any]], dtype: np.dtype[Any], axes: int
) -> tuple[np.dtype[Any], tuple[int, ...], list[str]]:
    """Return the stored dtype, the order of the axes, and the codecs of numcodecs."""
    order = tuple(range(axes))
    stages: list[str] = []
    for codec in codecs:
        name, options = codec["name"], codec.get("configuration") or {}
        if name == "transpose" and not stages:
            order = tuple(order[axis] for axis in _lengths(options["order"]))
        elif name == "bytes":
            dtype = dtype.newbyteorder(">" if options.get("endian") == "big" else "<")
        else:
            if name in _COMPRESSORS and not isinstance(codec.get("configuration"), Mapping):
                raise ValueError(f"the codec {name!r} without configuration")
            stages.append(json.dumps(_numcodec(name, options), sort_keys=True))
    return dtype, order, stages


def _numcodec(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of numcodecs for a codec of version 3."""
    if unknown := set(options) - _COMPRESSORS.get(name, set(options)):
        raise ValueError(f"unknown options {sorted(unknown)} of the codec {name!r}")
    if name in (*_COMPRESSORS, *_TEXT_CODECS, "crc32c"):
        return {"id": name}
    if name.startswith("numcodecs."):
        return {**options, "id": name.removeprefix("numcodecs.")}
    raise Unreadable(f"the codec {name!r}")


def _named(value: Any) -> Mapping[str, Any]:
    """Return an extension with its options: version 3 allows its name alone."""
    return {"name": value} if isinstance(value, str) else value


def _type(kind: Any) -> np.dtype[Any]:
    """Return the dtype of a data type of version 3."""
    if kind in ("string", "variable_length_bytes"):
        return TEXT
    if isinstance(kind, str):
        return _dtype("<i8" if kind == "<i8" else _TYPES.get(kind), kind)
    length = (kind.get("configuration") or {}).get("length_bytes", 0)
    codes = {"null_terminated_bytes": f"S{length}", "fixed_length_utf32": f"U{length // 4}"}
    return _dtype(codes.get(kind["name"]), kind["name"])


def _counted(kind: Any) -> tuple[Any, dict[str, Any]]:
    """Return the type of integers that NumPy's times are stored as, and the attributes that say so by CF.

    A type that is none of times is returned as it is.
    """
    if isinstance(kind, Mapping) and kind.get("name") in _TIMES:
        options = kind.get("configuration") or {}
        order, letter = "<", _TIMES[kind["name"]]
        count, unit = options.get("scale_factor", 1), options.get("unit")
    elif isinstance(kind, str) and (match := re.fullmatch(r"([<>])([Mm])8\[(\d*)([a-zA-Z]+)\]", kind)):
        order, letter, count, unit = match[1], match[2], match[3] or 1, match[4]
    else:
        return kind, {}
    if unit not in _UNITS:
        return kind, {}
    date = {"units": f"{_UNITS[unit]} since 1970-01-01", "calendar": "proleptic_gregorian"}
    scale = {} if int(count) == 1 else {"scale_factor": int(count)}
    return f"{order}i8", {**(date if letter == "M" else {"units": _UNITS[unit]}), "_FillValue": NAT, **scale}


def _dtype(code: Any, name: Any) -> np.dtype[Any]:
    reason = f"the type {name!r}, which has no equivalent among numbers and texts"
    if not isinstance(code, str):
        raise Unreadable(reason)
    try:
        dtype = np.dtype(code)
    except TypeError as error:
        raise Unreadable(reason) from error
    if dtype.kind not in "biufcSU" or not dtype.itemsize:
        raise Unreadable(reason)
    return dtype


def _lengths(values: Any) -> tuple[int, ...]:
    if not all(type(value) is int and 0 <= value < 1 << 62 for value in values):
        raise ValueError(f"lengths {values!r}")
    return tuple(values)


def _names(names: Any, axes: int) -> tuple[str, ...]:
    return ("",) * axes if names is None else tuple("" if name is None else name for name in names)


def _decoded(attributes: dict[str, Any], dtype: np.dtype[Any]) -> dict[str, Any]:
    """Return the attributes with the fill value as a number: xarray stores a float as base64 in version 3.

    Eight bytes in base64 end with a sign of equality, in contrast to numbers, such as "NaN".
    """
    fill = attributes.get("_FillValue")
    if isinstance(fill, str) and dtype.kind == "f":
        is_base64 = fill.endswith("=")
        attributes["_FillValue"] = struct.unpack("<d", base64.standard_b64decode(fill))[0] if is_base64 else float(fill)
    return attributes


def _fill(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return the fill value as an element of the dtype in native byte order."""
    if dtype == TEXT:
        return value.encode() if isinstance(value, str) else b""
    native = dtype.newbyteorder("=")
    if value == "NaT":
        value = NAT
    if value is None:
        return np.zeros((), native)[()]
    if dtype.kind == "S" and isinstance(value, str):
        value = base64.standard_b64decode(value)
    elif isinstance(value, str) and value.startswith("0x") and dtype.kind in "fiu":
        return np.frombuffer(bytes.fromhex(value[2:]), dtype.newbyteorder(">"), 1).astype(native)[0]
    elif dtype.kind == "c" and isinstance(value, list):
        value = complex(float(value[0]), float(value[1]))
    elif isinstance(value, str) and dtype.kind in "fc":
        value = float(value)
    return np.array(value).astype(native)[()]
