"""Layouts of HDF5 datasets: every type, storage, chunk index and filter, against h5py."""

from __future__ import annotations

import ctypes
from pathlib import Path
from time import monotonic
from typing import Any

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import matex_data as md
from matex_data.errors import DecodeError, FormatError
from matex_data.index.chunked import Chunked
from matex_data.index.library import MemoryRows
from matex_data.index.model import Index, Layout
from matex_data.index.strided import Strided
from matex_data.readers.hdf5.reader import index
from matex_data.readers.hdf5.rows import Hdf5Rows
from tests.support.machine_speed import scaled
from tests.support.serial import every_row, random_rows, read_rows, same

RANDOM = np.random.default_rng(7)
NUMBERS = [f"{order}{kind}" for order in "<>" for kind in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8")]
NUMBERS += [f"{order}{kind}" for order in "<>" for kind in ("f2", "f4", "f8", "c8", "c16")]
ENUM = h5py.enum_dtype({"none": 0, "muon": 13, "pion": -211}, ">i2")
OTHERS = [np.dtype(bool), ENUM, np.dtype("S7"), np.dtype("V5"), np.dtype((">f4", (3, 2)))]
RECORD = np.dtype([("id", ">i4"), ("p", "f8", (3,)), ("name", "S4"), ("good", "?")], align=True)
SECONDS = 20.0  # far more than opening a file takes on a machine that is busy, or pauses
LIBVERS = ["earliest", "v108", "latest"]
FILTERS: dict[str, dict[str, Any]] = {
    "raw": {},
    "shuffled": {"shuffle": True},
    "gzip": {"compression": 1, "shuffle": True, "fletcher32": True},
}


def values(shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """Return random values that use every byte of an element."""
    dtype = np.dtype(dtype)
    if dtype.subdtype is not None:
        return values((*shape, *dtype.subdtype[1]), dtype.subdtype[0])
    if dtype.names is not None:
        out = np.zeros(shape, dtype)
        for name in dtype.names:
            out[name] = values(shape, dtype[name])
        return out
    if h5py.check_enum_dtype(dtype) is not None:
        return RANDOM.choice(list(h5py.check_enum_dtype(dtype).values()), shape).astype(dtype)
    if dtype.kind == "b":
        return np.asarray(RANDOM.random(shape) < 0.5)
    if dtype.kind in "SV":
        codes = RANDOM.integers(65, 91, (*shape, dtype.itemsize), np.uint8)
        return np.asarray(codes.view(dtype).reshape(shape))
    if dtype.kind in "fc":
        out = np.asarray(RANDOM.normal(size=shape) * 100)
        return (out + 1j * out[::-1] if dtype.kind == "c" else out).astype(dtype)
    info = np.iinfo(dtype)
    return RANDOM.integers(info.min, info.max, shape, dtype.newbyteorder("="), endpoint=True).astype(dtype)


def check(path: Path, name: str, kind: type[Layout] | None = None) -> Index:
    """Compare all rows, and random rows in random order, with h5py; check the kind of the layout."""
    found = index(str(path), [name])
    with h5py.File(path) as file:
        expected = file[name][...]
        assert same(every_row(found, name), expected, file)
        for _ in range(4):
            rows, numbers = random_rows(found, name, RANDOM)
            assert same(rows, expected[numbers], file)
    field, layout = found.fields[name], found.files[0].layouts[name]
    assert kind is None or isinstance(layout, kind)
    assert field.shape == expected.shape[1:]
    assert len(found) == len(expected)
    if field.dtype.names is None and not field.ragged:
        assert field.dtype.isnative
        assert field.dtype.kind == expected.dtype.kind
        assert field.dtype.itemsize == expected.dtype.itemsize
    return found


@pytest.mark.parametrize("dtype", [*NUMBERS, *OTHERS, RECORD], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "chunked", "compact"])
def test_dtypes(tmp_path: Path, dtype: Any, layout: str) -> None:
    path = tmp_path / "a.h5"
    data = values((13, 3), dtype)
    with h5py.File(path, "w") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        if layout == "compact":
            plist.set_layout(h5py.h5d.COMPACT)
        if layout == "chunked":
            plist.set_chunk((4, 2))
            plist.set_shuffle()
            plist.set_deflate(4)
            plist.set_fletcher32()
        stored = h5py.h5t.py_create(np.dtype(dtype), logical=True)
        made = h5py.h5d.create(file.id, b"x", stored, h5py.h5s.create_simple((13, 3)), plist)
        h5py.Dataset(made)[...] = data
    kinds: dict[str, type[Layout]] = {"contiguous": Strided, "chunked": Chunked, "compact": MemoryRows}
    check(path, "x", kinds[layout])


@pytest.mark.parametrize("libver", LIBVERS)
@pytest.mark.parametrize("userblock", [0, 512, 2048])
@pytest.mark.parametrize(
    ("shape", "chunks", "maxshape"),
    [
        ((12,), (12,), None),
        ((12,), (40,), (None,)),
        ((13, 5), (4, 2), None),
        ((13, 5), (4, 2), (40, 20)),
        ((13, 5), (4, 2), (None, 5)),
        ((13, 5), (4, 2), (None, 20)),
        ((13, 5), (4, 2), (None, None)),
        ((13, 5), (4, 2), (13, None)),
        ((13, 5), (13, 2), (13, None)),
        ((6, 5, 4), (2, 3, 3), (9, None, 8)),
        ((6, 5, 4), (1, 5, 4), (None, 5, 4)),
        ((200, 3), (1, 3), (None, 3)),
    ],
)
def test_chunk_indexes(tmp_path: Path, libver: str, userblock: int, shape: Any, chunks: Any, maxshape: Any) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", libver=libver, userblock_size=userblock) as file:
        data = values(shape, "<i4") % 50  # so that no chunk takes as many bytes compressed as not
        for name, filters in FILTERS.items():
            file.create_dataset(name, data=data, chunks=chunks, maxshape=maxshape, **filters)
        file.create_dataset("flat", data=data)
        file.create_dataset("unwritten", data.shape, data.dtype)
    misplaced = maxshape in [(13, None), (9, None, 8)] and chunks[0] < 13 and libver != "earliest"
    for name in FILTERS:
        check(path, name, None if misplaced else Chunked)
    check(path, "flat", Strided)
    check(path, "unwritten", Chunked)


@pytest.mark.parametrize("libver", LIBVERS)
def test_chunks_allocated_at_once(tmp_path: Path, libver: str) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", libver=libver) as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((4, 2))
        plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        made = h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_INT32, h5py.h5s.create_simple((13, 5), (20, 7)), plist)
        h5py.Dataset(made)[2:9] = values((7, 5), "i4")
    check(path, "x", Chunked)


@pytest.mark.parametrize("libver", LIBVERS)
@pytest.mark.parametrize("fill", [None, 7])
@pytest.mark.parametrize("dtype", ["<i4", ">f8", ENUM, RECORD], ids=str)
def test_missing_chunks_hold_the_fill_value(tmp_path: Path, libver: str, fill: int | None, dtype: Any) -> None:
    path = tmp_path / "a.h5"
    value = None if fill is None else np.full((), 13 if dtype is ENUM else fill, dtype)
    with h5py.File(path, "w", libver=libver) as file:
        partial = file.create_dataset("partial", (13, 5), dtype, chunks=(4, 2), maxshape=(None, 5), fillvalue=value)
        partial[5:7, 1:4] = values((2, 3), dtype)
        file.create_dataset("none", (13, 5), dtype, chunks=(4, 2), fillvalue=value)
        file.create_dataset("flat", (13, 5), dtype, fillvalue=value)
        file.create_dataset("items", (13,), np.dtype((">f4", (3,))), chunks=(4,))
    for name in ("partial", "none", "flat", "items"):
        check(path, name, Chunked)


def test_fill_value_of_an_array_type(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((4,))
        record = np.dtype([("v", "<f4", (3,))])
        file.create_dataset("x", (9,), record, chunks=(4,), fillvalue=np.array(([1, 2, 3],), record))
        file["x"][0:2] = np.zeros(2, record)
    check(path, "x")


def test_filters_that_some_chunks_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    data = values((8, 6), "<i2")
    with h5py.File(path, "w") as file:
        made = file.create_dataset("x", (8, 6), "<i2", chunks=(2, 6), shuffle=True, compression=4, fletcher32=True)
        made[...] = data
        made.id.write_direct_chunk((2, 0), data[2:4].tobytes(), filter_mask=0b111)
        shuffled = np.ascontiguousarray(data[4:6].reshape(-1).view(np.uint8).reshape(-1, 2).T).tobytes()
        made.id.write_direct_chunk((4, 0), shuffled, filter_mask=0b110)
    found = check(path, "x", Chunked)
    layout = found.files[0].layouts["x"]
    assert isinstance(layout, Chunked)
    assert layout.mask.tolist() == [0, 0b111, 0b110, 0]
    assert same(every_row(found, "x"), data)


def test_checksums_as_hdf5_wrote_them_before_1_6_3(tmp_path: Path) -> None:
    """The bytes of each half of the sum are exchanged: h5py reads such chunks, and refuses those with another sum."""
    data = values((6, 4), "<i4")
    for name, order in (("old", [1, 0, 3, 2]), ("wrong", [1, 0, 2, 3])):
        path = tmp_path / f"{name}.h5"
        with h5py.File(path, "w") as file:
            made = file.create_dataset("x", data=data, chunks=(3, 4), fletcher32=True)
            for row in (0, 3):
                filters, chunk = made.id.read_direct_chunk((row, 0))
                changed = chunk[:-4] + bytes(chunk[-4 + i] for i in order)
                made.id.write_direct_chunk((row, 0), changed, filter_mask=filters)
        with h5py.File(path) as file:
            if name == "old":
                assert same(file["x"][:], data)
                assert same(every_row(check(path, "x", Chunked), "x"), data)
            else:
                with pytest.raises(OSError, match="filter"):
                    file["x"][:]
                with pytest.raises(DecodeError, match="checksum 0x"):
                    every_row(index(str(path)), "x")


def test_shape_that_grew_and_shrank(tmp_path: Path) -> None:
    for libver in LIBVERS:
        path = tmp_path / f"{libver}.h5"
        with h5py.File(path, "w", libver=libver) as file:
            for name, maxshape in {"one": (None, 6), "two": (None, None)}.items():
                made = file.create_dataset(name, data=values((10, 6), "i4"), chunks=(3, 4), maxshape=maxshape)
                made.resize((25, 6))
                made[20:] = 5
                made.resize((22, 6))
        check(path, "one", Chunked)
        check(path, "two", Chunked)


def test_rows_without_bytes_and_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["wide"] = np.zeros((4, 0), "f4")
        file["long"] = np.zeros((0, 3), "f4")
        file.create_dataset("grows", (0, 3), "f4", maxshape=(None, 3), compression=1)
    for name, rows in {"wide": 4, "long": 0, "grows": 0}.items():
        found = index(str(path), [name])
        assert len(found) == rows
        assert every_row(found, name).shape == (rows, *found.fields[name].shape)


FLOAT24 = h5py.h5t.IEEE_F32LE.copy()
FLOAT24.set_fields(23, 15, 8, 0, 15)
FLOAT24.set_size(3)
FLOAT24.set_ebias(127)
BFLOAT16 = h5py.h5t.IEEE_F32LE.copy()
BFLOAT16.set_fields(15, 7, 8, 0, 7)
BFLOAT16.set_size(2)
BFLOAT16.set_ebias(127)
INT12 = h5py.h5t.STD_I16LE.copy()
INT12.set_precision(12)
INT12.set_offset(3)
PADDED = h5py.h5t.C_S1.copy()
PADDED.set_size(6)
PADDED.set_strpad(h5py.h5t.STR_SPACEPAD)
TERMINATED = h5py.h5t.C_S1.copy()
TERMINATED.set_size(6)


@pytest.mark.parametrize(
    ("stored", "data"),
    [
        (h5py.h5t.STD_B16LE, np.arange(9, dtype="u2")),
        (h5py.h5t.STD_B32BE, np.arange(9, dtype="u4")),
        (INT12, np.arange(-4, 5, dtype="i2")),
        (FLOAT24, np.arange(9, dtype="f4") / 4),
        (BFLOAT16, np.arange(9, dtype="f4") / 4),
        (h5py.h5t.VAX_F32, np.arange(9, dtype="f4") / 4) if hasattr(h5py.h5t, "VAX_F32") else (INT12, np.arange(9)),
        (PADDED, np.array([b"a  b", b"", b"abcdef"])),
        (TERMINATED, np.array([b"ab", b"", b"abcde"])),
    ],
    ids=["bits16", "bits32 big-endian", "int12", "float24", "bfloat16", "vax", "space-padded", "terminated"],
)
def test_types_without_numpy_equivalent(tmp_path: Path, stored: Any, data: np.ndarray[Any, Any]) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        made = h5py.h5d.create(file.id, b"x", stored, h5py.h5s.create_simple(data.shape))
        made.write(h5py.h5s.ALL, h5py.h5s.ALL, data, None if data.dtype.kind == "S" else _memory_type(stored, data))
    found = check(path, "x", Hdf5Rows)
    assert same(every_row(found, "x"), data)


def _memory_type(stored: Any, data: np.ndarray[Any, Any]) -> Any:
    """Return the type in memory for the conversion; HDF5 converts bit fields to bit fields only."""
    if stored.get_class() != h5py.h5t.BITFIELD:
        return None
    return {2: h5py.h5t.NATIVE_B16, 4: h5py.h5t.NATIVE_B32}[data.dtype.itemsize]


def test_datasets_that_only_the_library_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.h5"
    monkeypatch.chdir(tmp_path)
    ragged = [values((n,), "i4") for n in (0, 3, 1, 7)]
    nested = np.dtype([("s", h5py.string_dtype()), ("v", h5py.vlen_dtype("f4")), ("n", ">i8")])
    with h5py.File(path, "w") as file:
        file["text"] = ["", "muon", "näher", "x" * 1000]
        file.create_dataset("text2", data=[[b"a", b"bc"]] * 4, dtype=h5py.string_dtype(), chunks=(3, 1), compression=1)
        made = file.create_dataset("ragged", (4,), h5py.vlen_dtype("i4"))
        made[:] = np.array([*ragged, None], object)[:-1]
        made = file.create_dataset("nested", (4,), nested)
        for i in range(4):
            made[i] = (f"s{i}", np.arange(i, dtype="f4"), i)
        file.create_dataset("scaled", data=np.arange(40).reshape(4, 10), chunks=(2, 5), scaleoffset=0)
        file.create_dataset("link", data=np.array([made.ref, file["text"].ref] * 2, h5py.ref_dtype))
        file.create_dataset("raw", data=np.arange(8).reshape(4, 2), external=[("raw.bin", 0, h5py.h5f.UNLIMITED)])
        layout = h5py.VirtualLayout((4, 10), "i8", maxshape=(None, 10))
        layout[...] = h5py.VirtualSource(file["scaled"])
        file.create_virtual_dataset("virtual", layout)
    for name in ("text", "text2", "ragged", "nested", "scaled", "link", "raw", "virtual"):
        check(path, name, Hdf5Rows)
    field = index(str(path), ["ragged"]).fields["ragged"]
    assert (field.ragged, field.dtype, field.shape) == (True, np.dtype("i4"), ())
    assert all(row.dtype == np.dtype("i4") for row in every_row(index(str(path), ["ragged"]), "ragged"))


def test_references_are_left_out_unless_they_are_named(tmp_path: Path) -> None:
    """Such as the columns of NWB: no tensor has them."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(2)
        file.create_dataset("group", data=np.array([file["x"].ref] * 2, h5py.ref_dtype))
        region = np.array([file["x"].regionref[:1]] * 2, h5py.regionref_dtype)
        file.create_dataset("region", data=region)
    with pytest.warns(UserWarning, match=r"2 fields cannot be read[\s\S]*'group': .* references"):
        assert list(index(str(path)).fields) == ["x"]
    check(path, "group", Hdf5Rows)
    with pytest.raises(FormatError, match=r"no tensors[\s\S]*found: references"):
        md.open_dataset(path, inputs="group", comm=MPI.COMM_SELF).tf_dataset(1)


def test_arrays_of_lists_are_no_tensors(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        kind = h5py.h5t.array_create(h5py.h5t.vlen_create(h5py.h5t.NATIVE_INT32), (2,))
        h5py.h5d.create(file.id, b"x", kind, h5py.h5s.create_simple((3,)))
    check(path, "x", Hdf5Rows)
    with pytest.raises(FormatError, match=r"no tensors[\s\S]*found: lists of different lengths"):
        md.open_dataset(path, comm=MPI.COMM_SELF).tf_dataset(1)


def test_links(tmp_path: Path) -> None:
    other, path = tmp_path / "other.h5", tmp_path / "a.h5"
    with h5py.File(other, "w") as file:
        file["x"] = values((9, 2), ">f4")
    with h5py.File(path, "w") as file:
        file["run1/images"] = values((9, 2), "u1")
        file["soft"] = h5py.SoftLink("/run1/images")
        file["hard"] = file["run1/images"]
        file["elsewhere"] = h5py.ExternalLink("other.h5", "/x")
    for name in ("run1/images", "/run1/images", "run1//images", "soft", "hard"):
        check(path, name, Strided)
    check(path, "elsewhere", Hdf5Rows)
    assert list(index(str(path), None).fields) == ["hard"]


UNFILTERED_EDGES = 2  # H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS


def test_unfiltered_edge_chunks(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    data = values((11, 5), "<i4")
    with h5py.File(path, "w", libver="latest") as file:
        for name, option in {"all": 0, "inner": UNFILTERED_EDGES}.items():
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            plist.set_chunk((4, 2))
            plist.set_shuffle()
            set_chunk_options(plist, option)
            space = h5py.h5s.create_simple((11, 5))
            h5py.Dataset(h5py.h5d.create(file.id, name.encode(), h5py.h5t.STD_I32LE, space, plist))[...] = data
    check(path, "all", Chunked)
    check(path, "inner", Hdf5Rows)


def set_chunk_options(plist: Any, options: int) -> None:
    """Call H5Pset_chunk_opts, which h5py does not have, in the library that h5py has loaded."""
    with Path("/proc/self/maps").open() as maps:
        libraries = {line.split()[-1] for line in maps if "libhdf5" in line and "_hl" not in line}
    loaded = [ctypes.CDLL(name) for name in libraries if "h5py" in name]
    if len(loaded) != 1:
        pytest.skip("h5py brings no library of its own")
    loaded[0].H5Pset_chunk_opts.argtypes = [ctypes.c_int64, ctypes.c_uint]
    assert loaded[0].H5Pset_chunk_opts(plist.id, options) == 0


def test_huge_datasets_open_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    rows = 2**40 // 48_000
    with h5py.File(path, "w", libver="latest") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        space = h5py.h5s.create_simple((rows, 12_000))
        made = h5py.Dataset(h5py.h5d.create(file.id, b"flat", h5py.h5t.IEEE_F32LE, space, plist))
        made[rows - 1] = 3.5
        for name, length in {"sparse": 2**36, "too sparse": 2**44}.items():
            options: Any = {"chunks": (2**16, 3), "maxshape": (None, 3), "fillvalue": 9}
            made = file.create_dataset(name, (length, 3), "u1", **options)
            made[length // 2] = 1
    kinds = {"flat": (Strided, 3.5), "sparse": (Chunked, 9), "too sparse": (Hdf5Rows, 9)}
    for name, (kind, last) in kinds.items():
        start = monotonic()
        found = index(str(path), [name])
        assert monotonic() - start < scaled(SECONDS)
        assert isinstance(found.files[0].layouts[name], kind)
        end = np.array([len(found) - 1], np.int64)
        assert (read_rows(found, name, end, np.zeros(1, np.int64)) == last).all()


BIG_ENDIAN = {
    "integers": np.dtype(">i4"),
    "floats": np.dtype(">f8"),
    "members": np.dtype([("n", ">i2"), ("x", "<f4")]),
    "names": h5py.enum_dtype({"A": 1, "B": 2, "C": 3}, ">i2"),
}


def _loaded(path: Path) -> dict[str, Any]:
    return md.open_dataset(path, comm=MPI.COMM_SELF).load()


def test_lists_in_the_other_byte_order(tmp_path: Path) -> None:
    """The expected values are those that were written: h5py reads other ones."""
    path = tmp_path / "x.h5"
    expected = {name: [np.arange(1, i + 2).astype(kind) for i in range(3)] for name, kind in BIG_ENDIAN.items()}
    with h5py.File(path, "w") as file:
        for name, kind in BIG_ENDIAN.items():
            file.create_dataset(name, (3,), h5py.vlen_dtype(kind))
            for i, numbers in enumerate(expected[name]):
                file[name][i] = numbers
        table = file.create_dataset("table", (3,), np.dtype([("hits", h5py.vlen_dtype(np.dtype(">f4")))]))
        for i in range(3):
            table[i] = (np.arange(1, i + 2).astype(">f4"),)
    stored = path.read_bytes()
    assert expected["integers"][2].tobytes() in stored and expected["floats"][2].tobytes() in stored
    found = _loaded(path)
    for name, lists in expected.items():
        assert [list(numbers) for numbers in found[name]] == [list(numbers) for numbers in lists], name
    member = md.open_dataset(path, comm=MPI.COMM_SELF, inputs="table/hits").load()["table/hits"]
    for lists in (found["table"]["hits"], member):
        assert [list(numbers) for numbers in lists] == [[1], [1, 2], [1, 2, 3]]


def test_texts_of_pytables_in_the_other_byte_order(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        texts = file.create_dataset("texts", (2,), h5py.vlen_dtype(np.dtype(">u4")))
        for i, text in enumerate(("paraŀlel", "x")):
            texts[i] = np.array([ord(letter) for letter in text], ">u4")
        texts.attrs.update(
            {"CLASS": np.bytes_("VLARRAY"), "PSEUDOATOM": np.bytes_("vlunicode"), "VERSION": np.bytes_("1.3")}
        )
        file.attrs.update({"CLASS": np.bytes_("GROUP"), "PYTABLES_FORMAT_VERSION": np.bytes_("2.1")})
    found = _loaded(tmp_path / "x.h5")
    assert found["texts"].tolist() == ["paraŀlel".encode(), b"x"]
