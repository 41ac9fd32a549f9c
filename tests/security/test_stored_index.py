"""A stored index is a file that anybody may have made: it runs nothing, leads nowhere else, and takes no memory."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from matex_data import DataError, FormatError, open_dataset
from matex_data.abc import Field, FileIndex, Index
from matex_data.index.columns import MAGIC, unpacked
from matex_data.index.descriptors import Origin, join, separate
from matex_data.index.stored import from_bytes, to_bytes
from matex_data.opening.indexing import Reading
from matex_data.readers.hdf5.rows import Hdf5Rows
from matex_data.readers.zarr.stores import Directory
from matex_data.storage.trust import Trust
from tests.support.ranks import Pool

ROWS = 5
HEADER = struct.Struct("<16s16sQ")
STRIDED = "matex_data.index.strided:Strided"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    for number in range(3):
        np.save(folder / f"{number}.npy", np.arange(3 * ROWS, dtype="f4").reshape(ROWS, 3) + 100 * number)
    return folder


@pytest.fixture
def index(data: Path, tmp_path: Path) -> Path:
    """Return the index of the files, as this release writes it."""
    path = tmp_path / "run.matex"
    open_dataset(data, comm=MPI.COMM_SELF, index=path)
    return path


def _write(path: Path, description: Any, columns: bytes) -> None:
    """Write a stored index with a right checksum."""
    text = description if isinstance(description, bytes) else json.dumps(description).encode()
    body = text + bytes(-(HEADER.size + len(text)) % 64) + columns
    path.write_bytes(HEADER.pack(MAGIC, hashlib.blake2b(body, digest_size=16).digest(), len(text)) + body)


def _change(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the description of a stored index."""
    description, columns = unpacked(path.read_bytes())
    changed = change(description)
    _write(path, description if changed is None else changed, bytes(columns._memory))


def _opened(comm: MPI.Intracomm, data: Path, index: Any) -> tuple[list[str], int]:
    """Return the warnings of opening a data set, and the number of its samples."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = open_dataset(data, comm=comm, index=index)
    return [str(warning.message) for warning in caught], len(found)


def _check_made_anew(data: Path, index: Path, found: str) -> None:
    """Check that a stored index is not used, since something is found in it."""
    told, rows = _opened(MPI.COMM_SELF, data, index)
    assert rows == 3 * ROWS
    assert len(told) == 1 and "is made anew" in told[0] and found in told[0], told
    assert _opened(MPI.COMM_SELF, data, index) == ([], 3 * ROWS)


class _Runs:
    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._mark}",)


class _System:
    """The function ``os.system`` by the name of a module that an earlier release trusted."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def pickled(self) -> bytes:
        text = f"touch {self._mark}"
        return (
            b"\x80\x04cmatex_data.index.stored\nos.system\n(X" + struct.pack("<I", len(text)) + text.encode() + b"tR."
        )


@pytest.mark.rank_counts(1, 3)
@pytest.mark.parametrize("inner", [False, True])
def test_pickles_of_earlier_versions_run_nothing(pool: Pool, data: Path, tmp_path: Path, inner: bool) -> None:
    index, mark = tmp_path / "run.matex", tmp_path / "mark"
    pickled = pickle.dumps(_Runs(mark)) if inner else _System(mark).pickled()
    body = pickled
    digest = hashlib.blake2b(body, digest_size=16).digest()
    index.write_bytes(struct.pack("<16s16sQQ", b"matex index 1\n\0\0", digest, len(pickled), 0) + body)
    for error in pool.outcomes(_opened, data, index):
        assert isinstance(error, FormatError) and "earlier version" in str(error) and "delete it" in str(error)
    assert not mark.exists()


def _first_layout(description: Any, change: Callable[[Any], Any]) -> None:
    """Change the descriptor of the layouts of the first group."""
    group = description["files"]["groups"][0]
    group["descriptor"] = json.dumps(change(json.loads(group["descriptor"])))


def _replaced(old: Any, new: Any) -> Callable[[Any], None]:
    """Return the change of a descriptor that replaces a value wherever it stands."""

    def replace(value: Any) -> Any:
        if value == old:
            return new
        return [replace(one) for one in value] if isinstance(value, list) else value

    def change(description: Any) -> None:
        _first_layout(description, replace)

    return change


@pytest.mark.parametrize(
    "name",
    [
        *("os:system", "matex_data.index.stored:os.system", "matex_data.index.stored.os:system", "builtins:eval", ""),
        *("matex_data.index.stored:save", "posix:system", STRIDED + ".__init__", "this:s", "matex_data.__main__:main"),
    ],
)
def test_only_declared_names_are_resolved(data: Path, index: Path, name: str) -> None:
    before = set(sys.modules)
    _change(index, _replaced(STRIDED, name))
    _check_made_anew(data, index, "cannot be imported" if ".os:" in name else "is not declared")
    assert "this" not in sys.modules and not {"matex_data.__main__"} & (set(sys.modules) - before)


def test_nothing_within_a_descriptor_is_unpickled(data: Path, index: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    pickled = pickle.dumps(_Runs(mark))
    description, columns = unpacked(index.read_bytes())
    memory = bytes(columns._memory)
    at = len(memory) + -len(memory) % 64
    group = description["files"]["groups"][0]
    ends = {"dtype": "<i8", "count": group["count"], "all": len(pickled)}
    group["arrays"] = [{"values": {"dtype": "|u1", "count": len(pickled), "at": at}, "ends": ends}]
    _first_layout(description, lambda value: ["dict", "array", ["pickled", "x"], *value[3:]])
    _write(index, description, memory.ljust(at, b"\0") + pickled)
    _check_made_anew(data, index, "a pickled object of 'x'")
    assert not mark.exists()


def _layouts(descriptor: Any) -> Callable[[Any], None]:
    return lambda description: _first_layout(description, lambda _: descriptor)


def _files(**values: Any) -> Callable[[Any], None]:
    def change(description: Any) -> None:
        files = description["files"]
        for name, value in values.items():
            (files["numbers"] if name in files["numbers"] else files)[name] = value

    return change


def _column(count: int, **values: Any) -> dict[str, Any]:
    return {"dtype": "<i8", "count": count, **values}


def _deep(depth: int) -> Callable[[Any], None]:
    def change(description: Any) -> None:
        text = "[" * depth + "]" * depth
        description["files"]["groups"][0]["descriptor"] = text

    return change


def _nested(value: Any) -> Any:
    for _ in range(200):
        value = ["tuple", value]
    return value


def _shared_twice(value: Any) -> Any:
    """Return tuples in tuples, of which each has an object before it a hundred times."""
    layout = value[2]
    sums = "matex_data.index.combined:Concatenated"
    for number in range(20):
        layout = ["of", sums, "parts", ["tuple", layout, *[["again", number]] * 99], "first", None]
    return ["dict", "array", layout]


@pytest.mark.parametrize(
    "change, found",
    [
        (_files(rows=_column(4, all=ROWS)), "4 numbers"),
        (_files(rows=_column(3, all=-ROWS)), "negative number of rows"),
        (_files(rows=_column(3, all=ROWS + 1)), "first rows"),
        (_files(rows=_column(3, at=2**40)), "beyond the end"),
        (_files(rows=_column(3, at=-64)), "beyond the end"),
        (_files(rows={"dtype": "<f8", "count": 3, "at": 0}), "instead of a column"),
        (_files(rows={"dtype": "|O", "count": 3, "at": 0}), "instead of a column"),
        (_files(rows=_column(3, all=2**70)), "as int64"),
        (_files(rows="3"), "instead of a column"),
        (_files(group=_column(3, all=1)), "groups that there are not"),
        (_files(group=_column(3, all=-1)), "groups that there are not"),
        (_files(position=_column(3, all=3)), "positions of files"),
        (_files(position=_column(3, all=-1)), "positions of files"),
        (_files(groups=[]), "groups that there are not"),
        (_files(groups=5), "instead of groups"),
        (_files(facts={}), "instead of facts"),
        (_files(facts=[]), "layouts that are not those of"),
        (_files(more=1), "instead of an object"),
        (_deep(30), "cannot be made"),
        (_deep(5000), "no JSON"),
        (lambda description: _first_layout(description, _nested), "nested more than"),
        (lambda description: _first_layout(description, _shared_twice), "objects within one"),
        (_replaced("shape", "shapes"), "with the fields"),
        (_replaced("<f4", "<f4\0"), "instead of a dtype"),
        (_replaced("<f4", "|V99999999999"), "instead of a dtype"),
        (_replaced(2, 9), "instead of a mark"),
        (_layouts(["dict", "array", 2]), "numbers and 0 arrays"),
        (_layouts(["dict", "array", ["again", 0]]), "not described"),
        (lambda description: description["numbers"].update(count=10**15), "beyond the end"),
        (lambda description: [], "instead of an object"),
        (lambda description: b"[" * 10**5, "no JSON"),
        (lambda description: b"\xff{", "no JSON"),
    ],
)
def test_descriptions_that_do_not_fit(data: Path, index: Path, change: Callable[[Any], Any], found: str) -> None:
    _change(index, change)
    _check_made_anew(data, index, found)


CLAIMS = {
    "equal numbers": _files(rows=_column(10**13, all=1), first_row=_column(10**13 + 1, all=0)),
    "lists": lambda description: description["files"]["groups"][0].update(
        arrays=[{"values": _column(10**13, all=1), "ends": _column(3, all=10**13)}]
    ),
    "paths": lambda description: description["files"]["paths"]["endings"].update(ends=_column(10**13, all=0)),
    "group": lambda description: description["files"]["groups"][0].update(
        count=10**13, numbers=[_column(10**13, all=1)] * 5
    ),
    "array": _replaced(["tuple", 2], ["array", "<f8", [2, 2, 2]]),
    "objects": _replaced(["tuple", 2], ["objects", [2], None]),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_sizes_that_are_only_claimed_take_no_memory(data: Path, index: Path, name: str) -> None:
    _change(index, CLAIMS[name])
    code = (
        "import resource, sys, warnings, matex_data as md\n"
        "from mpi4py import MPI\n"
        "from matex_data.index.descriptors import Origin\n"
        "from matex_data.index.stored import from_bytes, mapped\n"
        "data = mapped(sys.argv[1])\n"
        "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        "try:\n"
        "    from_bytes(data, Origin(False))\n"
        "except md.FormatError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(index)], capture_output=True, text=True, timeout=60)
    assert "the stored index is damaged" in done.stdout, done


@pytest.mark.parametrize("other", ["/etc/", "../files/", "files/"])
def test_paths_are_those_that_the_user_names(data: Path, index: Path, other: str) -> None:
    _change(index, lambda description: description["files"]["paths"].update(prefix=other))
    _check_made_anew(data, index, "of other files")


def test_another_key_is_another_index(data: Path, index: Path) -> None:
    _change(index, lambda description: description.update(key=Reading("npy", None, {}).key(["x"])))
    _check_made_anew(data, index, "of other files")


def _failed(comm: MPI.Intracomm, data: Path, index: Any, always: str = "error") -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter(always)  # type: ignore[arg-type]
        return open_dataset(data, comm=comm, index=index)


@pytest.mark.rank_counts(1, 3)
@pytest.mark.parametrize("name", ["", ".", "x" * 300, "a\0b", "/dev/null"])
def test_names_that_are_no_file(pool: Pool, data: Path, tmp_path: Path, name: str) -> None:
    index = name and (name if "\0" in name else str(tmp_path / name))
    errors = pool.outcomes(_failed, data, index, timeout=30)
    assert all(isinstance(error, FormatError) and "index" in str(error) for error in errors), errors
    assert len({str(error) for error in errors}) == 1


@pytest.mark.rank_counts(1, 3)
def test_a_pipe_is_no_index(pool: Pool, data: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    errors = pool.outcomes(_failed, data, tmp_path / "pipe", timeout=30)
    assert all(isinstance(error, FormatError) for error in errors), errors


@pytest.mark.rank_counts(1, 3)
def test_warnings_that_are_errors_are_errors_of_all_ranks(pool: Pool, data: Path, index: Path) -> None:
    index.write_bytes(index.read_bytes()[:-5])
    errors = pool.outcomes(_failed, data, index, timeout=30)
    assert all(isinstance(error, UserWarning) and "made anew" in str(error) for error in errors), errors
    errors = pool.outcomes(_failed, data, index.parent / "no folder" / "run.matex", timeout=30)
    assert all(isinstance(error, UserWarning) and "cannot be written" in str(error) for error in errors), errors


PLUGIN = """
import numpy as np
from matex_data.abc import Field, FileIndex, Index, LibraryRows, Strided, declared

class Plain(LibraryRows):
    block_rows = 1
    def __init__(self, path, rows):
        self.path, self.rows = path, rows
    def read(self, start, stop):
        return 10.0 * np.arange(start, stop)

class Stored(Plain):
    def to_json(self):
        return {"path": self.path, "rows": self.rows, "table": np.arange(self.rows)}
    @classmethod
    def from_json(cls, values):
        assert values["table"].tolist() == list(range(values["rows"]))
        return cls(values["path"], values["rows"])

@declared
def negative(stored, out):
    out[...] = -stored.astype("f8")

def index(path, names=None, *, stored=True):
    rows = 4
    kinds = {"x": Stored if stored else Plain, "y": None}
    numbers = Strided(rows, 0, 1, np.dtype("i1"), (), convert=negative)
    layouts = {name: kind(path, rows) if kind else numbers for name, kind in kinds.items()}
    fields = {name: Field(name, (), np.dtype("f8")) for name in layouts}
    from matex_data.index.stamps import Stamp
    return Index(fields, [FileIndex(path, rows, layouts, Stamp.of(path))])
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of two files of a format of another package, which is installed."""
    site, folder = tmp_path / "site", tmp_path / "points"
    (site / "hostile_points-1.dist-info").mkdir(parents=True)
    (site / "hostile_points.py").write_text(PLUGIN)
    (site / "hostile_points-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: hostile-points\n")
    entry = "[matex_data.readers]\npoints = hostile_points:index\n"
    (site / "hostile_points-1.dist-info" / "entry_points.txt").write_text(entry)
    folder.mkdir()
    for name in "ab":
        (folder / name).write_bytes(b"\1\2\3\4")
    return folder


def _in_site(comm: MPI.Intracomm, folder: Path, site: str, **options: Any) -> Any:
    """Return what a rank loads with a further folder of packages."""
    from matex_data.readers import formats

    sys.path.insert(0, site)
    formats._plugin_formats.cache_clear()
    try:
        data = open_dataset(sorted(map(str, folder.iterdir())), comm=comm, format="points", **options)
        return {name: values.tolist() for name, values in data.load().items()}
    finally:
        sys.path.remove(site)
        sys.modules.pop("hostile_points", None)  # the next job imports it again
        formats._plugin_formats.cache_clear()


@pytest.mark.rank_counts(1, 3)
def test_layouts_of_another_package(pool: Pool, plugin: Path, tmp_path: Path) -> None:
    site, index = str(tmp_path / "site"), tmp_path / "run.matex"
    for _ in range(2):
        by_rank = pool.run(_in_site, plugin, site, index=index)
        assert [value for of_rank in by_rank for value in of_rank["x"]] == [0.0, 10.0, 20.0, 30.0] * 2
        assert [value for of_rank in by_rank for value in of_rank["y"]] == [-1.0, -2.0, -3.0, -4.0] * 2
    assert b"hostile_points:Stored" in index.read_bytes()


@pytest.mark.rank_counts(1, 3)
def test_layouts_without_the_methods_are_shared_but_not_stored(pool: Pool, plugin: Path, tmp_path: Path) -> None:
    site, index = str(tmp_path / "site"), tmp_path / "run.matex"
    by_rank = pool.run(_in_site, plugin, site, stored=False)
    assert [value for of_rank in by_rank for value in of_rank["x"]] == [0.0, 10.0, 20.0, 30.0] * 2
    errors = pool.outcomes(_in_site, plugin, site, stored=False, index=index)
    assert all(isinstance(error, FormatError) and "hostile_points.Plain" in str(error) for error in errors), errors
    assert all("to_json and from_json" in str(error) for error in errors)
    assert not index.exists()


def test_a_layout_of_a_file_that_is_not_trusted_is_refused(data: Path) -> None:
    field = Field("x", (), np.dtype("f8"))
    rows = Hdf5Rows("/etc/passwd", "x", 1, 1, np.dtype("f8"))
    stored = to_bytes(Index({"x": field}, [FileIndex(str(data / "0.npy"), 1, {"x": rows})]))
    with pytest.raises(DataError, match="not trusted"):
        from_bytes(stored, Origin(False))
    _, found = from_bytes(stored, Origin(False, trust=Trust.of(["/etc"])))
    assert found.files[0].layouts["x"].sources() == ("/etc/passwd",)
    with pytest.raises(DataError, match="not trusted"):  # a copy for another process trusts no more
        pickle.loads(pickle.dumps(_distrusted(found)))


def _distrusted(index: Index) -> Any:
    """Return the files of an index as those of a stored one that nothing is trusted with."""
    _, found = from_bytes(to_bytes(index), Origin(False, trust=Trust.of(["/etc"])))
    for group in found.files._groups:
        object.__setattr__(group, "origin", Origin(False))
    return found.files


def test_what_a_file_says_of_trust_does_not_count(data: Path) -> None:
    store = Directory(str(data), Trust.of(["/"]))
    user = Trust.of([str(data)])
    assert join(separate(store), origin=Origin(False, trust=user)) == Directory(str(data), user)
    assert join(separate(store)) == store  # of a rank of this job
