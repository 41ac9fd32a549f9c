"""Types of the elements of a dataset: those in memory that h5py has, and those of NumPy whose bytes are in the file."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import h5py
import numpy as np

from matex_data._types import Array
from matex_data.index.chunked import MemberPath
from matex_data.readers.hdf5.names import HDF5_ERRORS

REFERENCES = "references to objects of the file"


def element_type(dataset: h5py.Dataset) -> np.dtype[Any]:
    """Return the dtype of an element in memory; that of a table lacks the members for which h5py has no type.

    Raises
    ------
    TypeError : h5py has no type for the elements.
    """
    stored = dataset.id.get_type()
    found = _memory_type(stored)
    return stored.dtype if found is None else found  # the first one raises the error of h5py


def other_objects(dtype: np.dtype[Any]) -> str | None:
    """Return what elements, or those of lists, are if they are neither numbers nor texts; None if they are these."""
    inner = h5py.check_vlen_dtype(dtype)
    base = inner if isinstance(inner, np.dtype) else dtype
    while base.subdtype is not None:
        base = base.subdtype[0]
    if not base.hasobject or base.names is not None or h5py.check_string_dtype(base) is not None:
        return None
    return REFERENCES if h5py.check_ref_dtype(base) is not None else "lists of different lengths"


def array_element(dtype: np.dtype[Any]) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    """Return the dtype of one number, the shape of one element, and whether elements have variable length."""
    item_type = h5py.check_vlen_dtype(dtype)
    if item_type is not None and h5py.check_string_dtype(dtype) is None:
        return np.dtype(item_type), (), True
    base = dtype
    item: tuple[int, ...] = ()
    while base.subdtype is not None:
        inner, shape = base.subdtype
        base, item = inner, item + shape
    if base.names is None:
        base = np.dtype(base.str)  # without the metadata that h5py adds to the dtype
    return base, item, False


def _memory_type(stored: h5py.h5t.TypeID) -> np.dtype[Any] | None:
    try:
        return stored.dtype  # type: ignore[no-any-return]
    except HDF5_ERRORS:
        pass
    if isinstance(stored, h5py.h5t.TypeArrayID):
        inner = _memory_type(stored.get_super())
        return None if inner is None else np.dtype((inner, stored.get_array_dims()))
    if not isinstance(stored, h5py.h5t.TypeCompoundID):
        return None
    types = {name: _memory_type(inner) for name, inner in _members(stored)}
    kept: Any = [(name, inner) for name, inner in types.items() if inner is not None]
    return np.dtype(kept) if kept else None


def unreadable_members(stored: h5py.h5t.TypeID) -> Iterator[tuple[str, str]]:
    """Yield the members of a table for which h5py has no type, as name (``outer/inner``) and the error of h5py."""
    try:
        stored.dtype  # noqa: B018 (raises)
        return
    except HDF5_ERRORS as error:
        found = str(error)
    while isinstance(stored, h5py.h5t.TypeArrayID):
        stored = stored.get_super()
    if not isinstance(stored, h5py.h5t.TypeCompoundID):
        yield "", found
        return
    for name, inner in _members(stored):
        yield from ((f"{name}/{rest}".rstrip("/"), error) for rest, error in unreadable_members(inner))


def _members(stored: h5py.h5t.TypeCompoundID) -> Iterator[tuple[str, h5py.h5t.TypeID]]:
    for i in range(stored.get_nmembers()):
        yield stored.get_member_name(i).decode("utf-8", "surrogateescape"), stored.get_member_type(i)


def stored_type(stored: h5py.h5t.TypeID, terminated: bool = False) -> np.dtype[Any] | None:
    """Return the NumPy type whose bytes are those in the file; None if there is none, or only for other members.

    Parameters
    ----------
    terminated : texts that end at their first null byte have no other bytes behind it, as those of PyTables.
    """
    if isinstance(stored, h5py.h5t.TypeArrayID):
        inner = stored_type(stored.get_super(), terminated)
        return None if inner is None else np.dtype((inner, stored.get_array_dims()))
    if not isinstance(stored, h5py.h5t.TypeCompoundID):
        dtype = _memory_type(stored)
        if terminated and isinstance(stored, h5py.h5t.TypeStringID) and not stored.is_variable_str():
            return dtype
        return None if dtype is None or not has_bytes_of(stored, dtype) else np.dtype(dtype.str)
    members = list(_members(stored))
    types = [stored_type(inner, terminated) for _, inner in members]
    kept = [i for i, inner in enumerate(types) if inner is not None]
    if not kept:
        return None
    return np.dtype(
        {
            "names": [members[i][0] for i in kept],
            "formats": [types[i] for i in kept],
            "offsets": [stored.get_member_offset(i) for i in kept],
            "itemsize": stored.get_size(),
        }
    )


def has_bytes_of(stored: h5py.h5t.TypeID, dtype: np.dtype[Any]) -> bool:
    """Return whether the bytes in the file are those of a NumPy array: width, precision, padding and byte order."""
    if dtype.hasobject:
        return False
    if isinstance(stored, h5py.h5t.TypeOpaqueID) or (stored == h5py.h5t.STD_B8LE and dtype == np.uint8):
        return True
    return bool(stored == h5py.h5t.py_create(dtype, logical=True))


def read_elements(dataset: h5py.Dataset, start: int, stop: int, dtype: np.dtype[Any]) -> Array:
    """Read rows of a table, only the members of ``dtype``: h5py refuses if it has no type for another one."""
    return _read_box(dataset, (start, *(0 for _ in dataset.shape[1:])), (stop - start, *dataset.shape[1:]), dtype)


def read_first(dataset: h5py.Dataset) -> Array:
    """Read the first element, as a check that HDF5 can."""
    return _read_box(dataset, (0,) * dataset.ndim, (1,) * dataset.ndim, element_type(dataset))


def _read_box(dataset: h5py.Dataset, begin: tuple[int, ...], shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    base, inner = (dtype, ()) if dtype.subdtype is None else dtype.subdtype
    elements = np.zeros((*shape, *inner), base)
    space = dataset.id.get_space()
    space.select_hyperslab(begin, shape)
    dataset.id.read(h5py.h5s.create_simple(shape), space, elements, h5py.h5t.py_create(dtype))
    return elements


def mislabelled(dtype: np.dtype[Any]) -> tuple[MemberPath, ...]:
    """Return the lists in an element that h5py reads as they are stored, but says to be in native byte order."""
    if dtype.names is not None:
        return tuple((name, *path) for name in dtype.names for path in mislabelled(dtype[name].base))
    item = None if h5py.check_string_dtype(dtype) is not None else h5py.check_vlen_dtype(dtype)
    wrong = item is not None and np.dtype(item).names is None and not np.dtype(item).isnative and _mislabels_lists()
    return ((),) if wrong else ()


@cache
def _mislabels_lists() -> bool:
    """Return whether h5py reads the number 1 of a list, which it stores in the other byte order, as another one.

    h5py 3.16 reads 256.
    """
    foreign = np.dtype("u2").newbyteorder()
    with h5py.File("lists", "w", driver="core", backing_store=False) as file:
        lists = file.create_dataset("lists", (1,), h5py.vlen_dtype(foreign))
        lists[0] = np.ones(1, foreign)
        return int(np.asarray(lists[0])[0]) != 1
