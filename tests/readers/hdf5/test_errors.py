"""Errors of the HDF5 reader, and damaged files."""

from __future__ import annotations

import errno
import itertools
import os
import pickle
import struct
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from matex_data.errors import DataError, DecodeError, FieldNotFound, FormatError, PartitionError
from matex_data.readers.hdf5.names import reported
from matex_data.readers.hdf5.reader import index
from matex_data.readers.hdf5.rows import DatasetRows
from tests.support.serial import every_row

Write = Callable[[h5py.File], None]


def write(path: Path, content: Write, **options: Any) -> str:
    with h5py.File(path, "w", **options) as file:
        content(file)
    return str(path)


def images(file: h5py.File) -> None:
    file["run1/images"] = np.arange(60).reshape(10, 6)
    file["run1/labels"] = np.arange(10)
    file["run1/names"] = np.arange(3)
    file["scalar"] = 3.0
    file["nothing"] = h5py.Empty("f4")
    file["nowhere"] = h5py.SoftLink("/run9")
    file["away"] = h5py.ExternalLink("no.h5", "/x")
    file["type"] = np.dtype("f4")


@pytest.mark.parametrize(
    ("name", "kind", "texts"),
    [
        ("run1/image", FieldNotFound, ["run1/image", "'run1/images'"]),
        ("images", FieldNotFound, ["images", "'run1/images'"]),
        ("run1", FormatError, ["a group", "'run1/images'"]),
        ("/", FormatError, ["a group"]),
        ("scalar", FormatError, ["no sample axis", "a single value"]),
        ("nothing", FormatError, ["no sample axis", "null dataspace"]),
        ("nowhere", FormatError, ["does not exist", "/run9"]),
        ("away", FormatError, ["does not exist", "no.h5"]),
        ("type", FormatError, ["a named datatype"]),
        ("", DataError, []),
        ("run1/images/x", DataError, ["run1/images/x"]),
    ],
)
def test_names_without_rows(tmp_path: Path, name: str, kind: type[DataError], texts: list[str]) -> None:
    path = write(tmp_path / "a.h5", images)
    with pytest.raises(kind) as caught:
        index(path, [name])
    for text in [path, *texts]:
        assert text in str(caught.value)
    again = pickle.loads(pickle.dumps(caught.value))  # errors travel between ranks
    assert (type(again), str(again)) == (type(caught.value), str(caught.value))


def test_lengths_that_differ_are_listed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", images)
    for names in (None, ["run1/images", "run1/names"]):
        with pytest.raises(FormatError, match="different numbers of samples") as caught:
            index(path, names)
        assert "3 samples in 'run1/names'" in str(caught.value)
        assert all(option in str(caught.value) for option in ("inputs=", "offsets=", 'sample="group"'))


def test_datasets_without_rows_are_left_out(tmp_path: Path) -> None:
    def content(file: h5py.File) -> None:
        file["a/x"] = np.arange(4)
        file["b"] = np.arange(8).reshape(4, 2)
        file["scalar"] = 1
        file["a/loop"] = file["/"]
        file["nowhere"] = h5py.SoftLink("/nowhere")

    assert sorted(index(write(tmp_path / "a.h5", content)).fields) == ["a/x", "b"]
    with pytest.raises(FormatError, match="no samples"):
        index(write(tmp_path / "empty.h5", lambda file: None))


def test_files_of_other_formats(tmp_path: Path) -> None:
    (tmp_path / "text.h5").write_text("no HDF5" * 1000)
    (tmp_path / "empty.h5").touch()
    for name, text in {"text.h5": "if it is", "empty.h5": "HDF5", "absent.h5": "No such", "": "directory"}.items():
        with pytest.raises(DataError, match=text):
            index(str(tmp_path / name), ["x"])


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_truncated_files_name_both_sizes(tmp_path: Path, libver: str) -> None:
    def content(file: h5py.File) -> None:
        file["x"] = np.arange(10_000)

    path = write(tmp_path / "a.h5", content, libver=libver)
    size = Path(path).stat().st_size
    os.truncate(path, size - 5000)
    with pytest.raises(FormatError, match="truncated") as caught:
        index(path, ["x"])
    assert str(size) in str(caught.value.expected)
    assert str(size - 5000) in str(caught.value.found)


def test_a_driver_block_that_claims_more_than_the_file_has(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.h5", images, libver="earliest"))
    content = bytearray(path.read_bytes())
    content[48:56] = struct.pack("<Q", len(content))  # its address
    content += struct.pack("<B3xI8s", 0, 1 << 20, b"NCSAmult") + bytes(64)
    content[40:48] = struct.pack("<Q", len(content))  # the end of the file
    path.write_bytes(content)
    with pytest.raises(FormatError) as caught:
        index(str(path))
    assert f"driver information block claims 1,048,576 bytes, and the file has {len(content):,}" in str(caught.value)


def test_a_dataset_behind_the_end_of_the_file(tmp_path: Path) -> None:
    """HDF5 itself misses the truncation of a file whose mark for writing was cleared."""

    def content(file: h5py.File) -> None:
        file["x"] = np.arange(10_000)
        file.create_dataset("y", data=np.arange(10_000), chunks=(1000,))

    path = write(tmp_path / "a.h5", content)
    with h5py.File(path) as file:
        ends = {"x": file["x"].id.get_offset() + 80_000, "y": file["y"].id.get_chunk_info(9).byte_offset + 8000}
    data = bytearray(Path(path).read_bytes())
    short = max(ends.values()) - 1
    data[40:48] = short.to_bytes(8, "little")  # superblock 0: end of file address
    Path(path).write_bytes(data[:short])
    for name, end in ends.items():
        if end > short:
            with pytest.raises(FormatError) as caught:
                index(path, [name])
            assert caught.value.field == name or caught.value.file == path


def unknown_filter(file: h5py.File) -> None:
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk((4,))
    plist.set_filter(305, h5py.h5z.FLAG_OPTIONAL, ())
    made = h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_INT32, h5py.h5s.create_simple((8,)), plist)
    made.write_direct_chunk((0,), b"compressed in some way")


def test_filter_that_is_not_installed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", unknown_filter)
    with pytest.raises(FormatError, match="not installed") as caught:
        index(path, ["x"])
    assert "305" in str(caught.value.found)
    assert "HDF5_PLUGIN_PATH" in str(caught.value.remedy)


def test_raw_data_file_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "a.h5", lambda file: file.create_dataset("x", (8,), "i4", external=[("raw.bin", 0, 32)]))
    with pytest.raises(FormatError, match="raw data file") as caught:
        index(path, ["x"])
    assert "raw.bin" in str(caught.value.expected)
    np.arange(8, dtype="i4").tofile("raw.bin")
    assert every_row(index(path, ["x"]), "x").tolist() == list(range(8))


def test_a_flipped_byte_changes_the_checksum(tmp_path: Path) -> None:
    def content(file: h5py.File) -> None:
        file.create_dataset("x", data=np.arange(64), chunks=(16,), fletcher32=True)

    path = write(tmp_path / "a.h5", content)
    found = index(path, ["x"])
    layout: Any = found.files[0].layouts["x"]
    data = bytearray(Path(path).read_bytes())
    data[int(layout.offset[2]) + 5] ^= 4
    Path(path).write_bytes(data)
    with pytest.raises(DecodeError, match="does not decode") as caught:
        every_row(found, "x")
    assert (caught.value.row, caught.value.byte) == (32, int(layout.offset[2]))


def test_a_file_that_is_open_for_writing_elsewhere_in_this_process(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(5)
        file["s"] = ["a", "b", "c", "d", "e"]
        file.flush()
        found = index(str(tmp_path / "a.h5"), ["x", "s"])
        assert every_row(found, "s").tolist() == [b"a", b"b", b"c", b"d", b"e"]


def test_attributes_are_small_and_plain(tmp_path: Path) -> None:
    def content(file: h5py.File) -> None:
        made = file.create_dataset("x", data=np.zeros(4, h5py.enum_dtype({"muon": 13}, "i2")))
        made.attrs.update(
            {"units": "GeV", "scale": 0.5, "axes": [1, 2], "names": ["a", "b"], "bytes": np.bytes_(b"ab")}
        )
        made.attrs["ref"] = made.ref
        made.attrs["empty"] = h5py.Empty("f4")
        made.attrs["large"] = np.zeros(1000)

    field = index(write(tmp_path / "a.h5", content), ["x"]).fields["x"]
    axes = field.attributes["axes"].tolist()
    plain = {name: value for name, value in field.attributes.items() if name != "axes"}
    assert axes == [1, 2]
    assert plain == {"enum": {"muon": 13}, "units": "GeV", "scale": 0.5, "names": ["a", "b"], "bytes": "ab"}
    assert pickle.loads(pickle.dumps(field)) == field


def test_datasets_that_are_left_out_are_named(tmp_path: Path) -> None:
    def content(file: h5py.File) -> None:
        file["y"] = np.arange(8)
        file["scalar"] = 1.0
        unknown_filter(file)
        file.create_dataset("raw", (8,), "i4", external=[("absent.bin", 0, 32)])

    path = write(tmp_path / "a.h5", content)
    with pytest.warns(UserWarning, match="2 fields cannot be read") as caught:
        assert list(index(path).fields) == ["y"]
    (warning,) = caught
    for text in (path, "'x'", "filter 305", "HDF5_PLUGIN_PATH", "'raw'", "absent.bin", "inputs="):
        assert text in str(warning.message)
    assert "scalar" not in str(warning.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(index(path, ["y"]).fields) == ["y"]


def test_the_listing_of_a_file_has_no_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hours = itertools.count(step=3600)
    monkeypatch.setattr("matex_data.readers.hdf5.names.monotonic", lambda: next(hours), raising=False)

    def content(file: h5py.File) -> None:
        for name in ("a", "b/x", "b/y/z", "c"):
            file[name] = np.arange(3)
        file["b/up"] = file["/"]
        file["d"] = file["b/x"]

    path = write(tmp_path / "a.h5", content)
    assert list(index(path).fields) == ["a", "b/x", "b/y/z", "c"]
    monkeypatch.setattr("matex_data.readers.hdf5.names.MAX_OBJECTS", 5)
    with pytest.raises(FormatError, match="cannot be listed"):
        index(path)


def test_selected_names_need_no_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HDF5 crashes on some damaged groups: this process never lists them, not even for a hint."""
    path = write(tmp_path / "a.h5", images)
    monkeypatch.setattr("matex_data.readers.hdf5.names.objects_of", None)
    monkeypatch.setattr(h5py.h5o, "visit", None)
    assert len(index(path, ["run1/images"])) == 10
    with pytest.raises(FieldNotFound, match="one of 'run1/labels'"):
        index(path, ["run1/label"])
    with pytest.raises(FormatError, match="a group"):
        index(path, ["run1"])


def _chunk_keys(data: bytearray) -> list[int]:
    """Return the offsets of the keys of the chunk index, a B-tree of version 1: size, mask, corner, address."""
    at = data.index(b"TREE\x01") + 24
    return [at + 32 * i for i in range(2)]


@pytest.fixture
def two_chunks(tmp_path: Path) -> Path:
    """Return a file with two chunks of 4 numbers."""
    content = partial(h5py.File.create_dataset, name="x", data=np.arange(8), chunks=(4,))
    return Path(write(tmp_path / "a.h5", content, libver="earliest"))


@pytest.mark.parametrize("address", [2**63, 2**64 - 2, 2**62, 2**63 - 8])
def test_chunks_beyond_any_file(two_chunks: Path, address: int) -> None:
    data = bytearray(two_chunks.read_bytes())
    at = _chunk_keys(data)[1] + 24
    assert data[at : at + 8] != bytes(8)
    data[at : at + 8] = address.to_bytes(8, "little")
    two_chunks.write_bytes(data)
    with pytest.raises(FormatError) as caught:
        index(str(two_chunks), ["x"])
    assert (caught.value.file, caught.value.field) == (str(two_chunks), "x")


@pytest.mark.parametrize("userblock", [0, 512])
@pytest.mark.parametrize("precision", [16, 12])
def test_a_chunk_at_the_begin_of_the_file(tmp_path: Path, userblock: int, precision: int) -> None:
    """An address of 0 in a damaged chunk table is that of the file's signature, whose bytes are no data."""
    stored = h5py.h5t.STD_I16LE.copy()
    stored.set_precision(precision)  # HDF5 alone reads integers of 12 bits

    def content(file: h5py.File) -> None:
        space, plist = h5py.h5s.create_simple((8,)), h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((4,))
        h5py.Dataset(h5py.h5d.create(file.id, b"x", stored, space, plist))[...] = np.arange(8)

    path = Path(write(tmp_path / "a.h5", content, libver="earliest", userblock_size=userblock))
    assert every_row(index(str(path), ["x"]), "x").tolist() == list(range(8))
    data = bytearray(path.read_bytes())
    at = _chunk_keys(data)[1] + 24
    data[at : at + 8] = bytes(8)
    path.write_bytes(data)
    with pytest.raises(FormatError, match="the chunk table is damaged") as caught:
        index(str(path), ["x"])
    assert (caught.value.file, caught.value.field) == (str(path), "x")


@pytest.mark.parametrize("name", ["x", "x/a"])
@pytest.mark.parametrize("userblock", [0, 512])
def test_a_contiguous_dataset_at_the_begin_of_the_file(tmp_path: Path, userblock: int, name: str) -> None:
    table = np.zeros(8, [("a", "i4"), ("b", "i4")])
    content = partial(h5py.File.create_dataset, name="x", data=table)
    path = Path(write(tmp_path / "a.h5", content, libver="earliest", userblock_size=userblock))
    with h5py.File(path) as file:
        offset = int(file["x"].id.get_offset()) - userblock
    data = bytearray(path.read_bytes())
    at = data.index(offset.to_bytes(8, "little") + (64).to_bytes(8, "little"))  # address and size in the layout message
    data[at : at + 8] = bytes(8)
    path.write_bytes(data)
    with pytest.raises(FormatError) as caught:
        index(str(path), [name])
    assert (caught.value.file, caught.value.field) == (str(path), name)


def test_hdf5_reads_datasets_with_two_entries_for_one_chunk(two_chunks: Path) -> None:
    data = bytearray(two_chunks.read_bytes())
    first, second = _chunk_keys(data)
    data[second + 8 : second + 24] = data[first + 8 : first + 24]
    two_chunks.write_bytes(data)
    with h5py.File(two_chunks) as file:
        expected = file["x"][...]
    assert every_row(index(str(two_chunks), ["x"]), "x").tolist() == expected.tolist()


def test_internal_attributes_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def content(file: h5py.File) -> None:
        file["x"] = np.arange(4)
        file["s"] = np.arange(4)
        file["s"].make_scale("s")
        file["x"].dims[0].attach_scale(file["s"])
        file["x"].attrs["units"] = "K"

    path = write(tmp_path / "a.h5", content)
    read: list[str] = []
    taken = h5py.AttributeManager.__getitem__
    monkeypatch.setattr(h5py.AttributeManager, "__getitem__", lambda self, name: read.append(name) or taken(self, name))
    assert index(path, ["x"]).fields["x"].attributes == {"units": "K"}
    assert read == ["units"]


class _Denied(DatasetRows):
    def take(self, start: int, stop: int) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")


def test_lack_of_memory_and_errors_of_the_system_are_no_damage() -> None:
    with pytest.raises(DataError, match="permissions") as raised:
        _Denied("a.h5", "x", 10, 1).read(3, 4)
    assert type(raised.value) is DataError and (raised.value.field, raised.value.row) == ("x", 3)
    with pytest.raises(PartitionError, match="no memory"), reported("the dataset cannot be read", "a.h5"):
        raise PartitionError("no memory")  # a ValueError, as those of h5py
    with pytest.raises(FormatError, match="the dataset cannot be read"), reported("the dataset cannot be read", "a.h5"):
        raise ValueError("wrong offset")
