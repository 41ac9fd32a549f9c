"""Every ROOT file of the corpus: each branch equals that of uproot and awkward, or raises a clear error."""

from __future__ import annotations

import resource
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import awkward as ak
import numpy as np
import pytest
import uproot
from mpi4py import MPI

from matex_data import open_dataset
from matex_data.errors import FormatError
from matex_data.readers.root.files import open_tree
from matex_data.readers.root.reader import index
from matex_data.sampling.schedule import rank_range
from tests.support.corpus import CORPUS, needs_corpus
from tests.support.ranks import Pools
from tests.support.serial import every_row, random_rows

FILES = sorted((CORPUS / "particle" / "root").glob("*.root"))
TREES = ("TTree", "ROOT::RNTuple")
LARGE = 500_000  # bytes; such files of the corpus take minutes: some have hundreds of branches of objects
BRANCHES = 12
"""Branches of a tree that are read on ranks, spread over the tree; all of them are read in this process."""

pytestmark = needs_corpus


def trees(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the key and the tree of each tree of a file."""
    with uproot.open({str(path): None}) as file:
        for key, kind in file.classnames().items():
            if kind in TREES:
                yield key, file[key]


def test_fields_within_fields_are_those_that_uproot_finds() -> None:
    """uproot searches all fields for those within each one, half a minute of 3,400 fields; so they are given to it."""
    seen = 0
    for path in FILES:
        for key, tree in trees(path):
            if hasattr(tree, "branches"):
                continue
            given = open_tree(str(path), key)
            assert all(field._fields is not None for field in given.all_fields)
            names = [[[inner.path for inner in field.fields] for field in each.all_fields] for each in (given, tree)]
            assert names[0] == names[1]
            seen += 1
    assert seen


def branch_names(tree: Any) -> list[str]:
    """Return the names of the branches that have entries of their own."""
    if not hasattr(tree, "branches"):
        return list(tree.keys(recursive=False))
    grouped = uproot.interpretation.grouped.AsGrouped
    return [name for name, branch in tree.iteritems() if not isinstance(branch.interpretation, grouped)]


def expected(tree: Any, name: str) -> Any:
    """Return the entries of a branch as uproot reads them; the exception if it cannot."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), limits[1]))  # uproot takes some objects for huge ones
    try:
        return tree[name].array(library="ak")
    except Exception as error:  # of many kinds
        return error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def equal(found: Any, array: Any) -> bool:
    """Return whether samples are those of an awkward array, their lengths and dtype included."""
    if len(found) != len(array):
        return False
    layout = ak.to_layout(ak.to_packed(array))
    if layout.parameter("__array__") == "string":
        return [bytes(text) for text in found] == [str(text).encode("utf-8", "surrogateescape") for text in array]
    if layout.is_record:
        return all(equal(found[name], array[name]) for name in layout.fields)
    if found.dtype != object:
        values = np.asarray(ak.to_numpy(array, allow_missing=False))
        same_bytes = np.array_equal(found, values, equal_nan=values.dtype.kind == "f")
        return bool(found.dtype == values.dtype and same_bytes)
    if len(found) == 0:
        return True
    if not np.array_equal([len(sample) for sample in found], ak.num(array)):
        return False
    return equal(np.concatenate(list(found)), ak.flatten(array))


def fields_of(array: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield name and entries of each member of a branch."""
    if not array.fields:
        yield name, array
    for key in array.fields:
        yield from fields_of(array[key], f"{name}.{key}")


def is_plain(array: Any) -> bool:
    """Return whether awkward gives numbers, strings, and lists and records of these."""
    return not isinstance(array, Exception) and "union" not in str(array.type) and "?" not in str(array.type)


def is_structured(array: Any) -> bool:
    """Return whether the entries, or the elements of lists, are records of numbers."""
    kind = str(array.type)
    return bool(array.fields and "string" not in kind and ("var" not in kind or kind.count("var") == _is_list(array)))


def _is_list(array: Any) -> bool:
    return bool(ak.to_layout(array).is_list)


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow) if path.stat().st_size > LARGE else path for path in FILES],
    ids=lambda path: path.name,
)
def test_every_branch_against_uproot(path: Path) -> None:
    for key, tree in trees(path):
        arrays = {name: expected(tree, name) for name in branch_names(tree)}
        readable = {name: array for name, array in arrays.items() if is_plain(array)}
        fields = dict(pair for name, array in readable.items() for pair in fields_of(array, name))
        fields |= {name: array for name, array in readable.items() if is_structured(array)}
        if fields:
            found = index(str(path), list(fields), tree=key)
            for name, array in fields.items():
                check(found, name, array)
        for name in [name for name in arrays if name not in readable][:4]:
            with pytest.raises(FormatError) as caught:
                index(str(path), [name], tree=key)
            assert str(path) in str(caught.value) and repr(name) in str(caught.value)
            assert tree[name].typename in ("unknown", "none") or tree[name].typename in str(caught.value)


def check(found: Any, name: str, values: Any) -> None:
    """Check all rows, and random ones in random order."""
    assert len(found) == len(values)
    assert equal(every_row(found, name), values), name
    if len(found):
        rows, numbers = random_rows(found, name, np.random.default_rng(zlib.crc32(name.encode())))
        assert equal(rows, values[numbers]), name


def _compare(comm: MPI.Intracomm, paths: list[Path]) -> tuple[int, list[str]]:
    """Return the number of fields whose rows of this rank are those of uproot, and the names of the others."""
    count, others = 0, []
    for path in paths:
        for key, tree in trees(path):
            names = branch_names(tree)
            chosen = names[:: -(-len(names) // BRANCHES)]
            arrays = {name: array for name in chosen if is_plain(array := expected(tree, name))}
            fields = dict(pair for name, array in arrays.items() for pair in fields_of(array, name))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if not fields:
                    others += [] if len(names) > BRANCHES or _refused(comm, path, key) else [f"{path} {key}: opened"]
                    continue
                data = open_dataset(path, tree=key, inputs=None if chosen == names else list(fields), comm=comm)
            others += [] if set(data.schema) == set(fields) else [f"{path} {key}: {set(data.schema) ^ set(fields)}"]
            rows, loaded = slice(*rank_range(len(data), comm.rank, comm.size)), data.load()
            wrong = [f"{path} {key} {name}" for name, array in fields.items() if not equal(loaded[name], array[rows])]
            others += wrong
            count += len(fields) - len(wrong)
    return count, others


def _refused(comm: MPI.Intracomm, path: Path, key: str) -> bool:
    try:
        open_dataset(path, tree=key, comm=comm)
    except FormatError as error:
        return str(path) in str(error)
    return False


@pytest.mark.parametrize("large", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_every_file_on_ranks(ranks: Pools, size: int, large: bool) -> None:
    paths = [path for path in FILES if (path.stat().st_size > LARGE) == large]
    found = ranks(size).run(_compare, paths, timeout=500)
    assert [others for _, others in found] == [[]] * size
    assert len({count for count, _ in found}) == 1
    assert found[0][0] > (20 if large else 200)
