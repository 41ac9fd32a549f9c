"""Files that name code: it does not run."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from mpi4py import MPI

from matex_data import DataError, open_dataset
from matex_data.readers import pickles


class Harmful:
    """Object whose pickle makes a file when it is loaded."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


def open_and_read(path: Path, **options: Any) -> None:
    """Open a file and read its first samples, whatever they are."""
    try:
        next(iter(open_dataset(str(path), comm=MPI.COMM_SELF, **options).batches(1)), None)
    except DataError:
        return


def zarr_codec(path: Path, code: bytes) -> None:
    """Write an array whose filter is numcodecs' ``pickle``."""
    (path / "x").mkdir(parents=True)
    (path / ".zgroup").write_text('{"zarr_format": 2}')
    metadata = {"zarr_format": 2, "shape": [2], "chunks": [2], "dtype": "<f8", "fill_value": 0, "order": "C"}
    (path / "x" / ".zarray").write_text(json.dumps(metadata | {"filters": [{"id": "pickle"}], "compressor": None}))
    (path / "x" / "0").write_bytes(code)


def zarr_texts(path: Path, code: bytes) -> None:
    """Write an array of objects whose codec is numcodecs' ``pickle``."""
    zarr_codec(path, code)
    text = (path / "x" / ".zarray").read_text()
    (path / "x" / ".zarray").write_text(text.replace("<f8", "|O"))


def zarr_version_3(path: Path, code: bytes) -> None:
    """Write an array of version 3 with the codec ``numcodecs.pickle``."""
    (path / "x" / "c").mkdir(parents=True)
    (path / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    codecs = [
        {"name": "numcodecs.pickle", "configuration": {}},
        {"name": "bytes", "configuration": {"endian": "little"}},
    ]
    grid = {"name": "regular", "configuration": {"chunk_shape": [2]}}
    metadata = {"zarr_format": 3, "node_type": "array", "shape": [2], "data_type": "float64", "chunk_grid": grid}
    metadata |= {"chunk_key_encoding": {"name": "default"}, "fill_value": 0, "codecs": codecs}
    (path / "x" / "zarr.json").write_text(json.dumps(metadata))
    (path / "x" / "c" / "0").write_bytes(code)


def pytables_attribute(path: Path, code: bytes) -> None:
    """Write a frame of pandas with a pickled attribute."""
    with h5py.File(path, "w") as file:
        file.attrs["PYTABLES_FORMAT_VERSION"] = b"2.1"
        group = file.create_group("frame")
        group.attrs["pandas_type"] = b"frame_table"
        group.attrs["non_index_axes"] = np.void(code)
        group["table"] = np.zeros(3, [("index", "i8"), ("values_block_0", "f8")])
        group["table"].attrs["values_block_0_kind"] = np.void(code)


def numpy_objects(path: Path, code: bytes) -> None:
    """Write an array of objects, which NumPy pickles."""
    header = "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(117) + "\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + code)


def cifar_batch(path: Path, code: bytes) -> None:
    """Write a batch of CIFAR."""
    path.write_bytes(code)


FORMATS: dict[str, tuple[Callable[[Path, bytes], None], str, dict[str, Any]]] = {
    "zarr": (zarr_codec, "a.zarr", {}),
    "zarr texts": (zarr_texts, "a.zarr", {}),
    "zarr 3": (zarr_version_3, "a.zarr", {}),
    "pytables": (pytables_attribute, "a.h5", {}),
    "npy": (numpy_objects, "a.npy", {}),
    "cifar": (cifar_batch, "data_batch_1", {"format": "cifar"}),
    "csv": (cifar_batch, "a.csv", {}),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_code_in_a_file_does_not_run(tmp_path: Path, name: str, protocol: int) -> None:
    write, file, options = FORMATS[name]
    target = tmp_path / "target"
    code = pickle.dumps(Harmful(target), protocol)
    write(tmp_path / file, code)
    open_and_read(tmp_path / file, **options)
    assert not target.exists()
    pickle.loads(code)
    assert target.exists()


@pytest.mark.parametrize(
    "code",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
        b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little") + b"x.",  # length of bytes
        b"\x80\x02" + b"]" * 100 + b"a" * 99 + b".",  # lists in lists
        b"\x80\x02]q\x00h\x00a.",  # a list that has itself
        b"\x80\x02]q\x00K\x01a]q\x01(h\x00h\x00e.",  # a list that another one has twice
        b"\x80\x02cnumpy\ndtype\nU\x06S99999999\x85R.",
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x05\x85U\x01btRN(K\x01b.",
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR(I1\n(L1099511627776L\nt"
        b"cnumpy\ndtype\n(S'S0'\nI0\nI1\ntR(I3\nS'|'\nNNNI0\nI1\nI0\ntbI00\nS''\ntb.",  # many texts of no bytes
        b"",
        b".",
        b"\x80\x05N",
    ],
)
def test_a_pickle_is_refused(code: bytes) -> None:
    with pytest.raises(ValueError, match=r"it |the pickle"):
        pickles.load(code)


def test_the_number_of_an_object_takes_no_memory() -> None:
    assert pickles.load(b"\x80\x02]r\xff\xff\xff\x7f.") == []


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
ARRAYS = npst.arrays(
    st.sampled_from(["f8", "<i4", ">i4", "u1", "?", "c8", "S3", "U2"]), npst.array_shapes(min_dims=1, max_dims=3)
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner)
)


@given(value=VALUES, protocol=st.integers(0, 5))
def test_values_are_those_of_pickle(value: Any, protocol: int) -> None:
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol)
    pickler.fast = True  # each list is written where it is
    pickler.dump(value)
    assert pickles.load(stream.getvalue()) == value


@given(array=ARRAYS, protocol=st.integers(0, 4))
def test_arrays_are_those_of_pickle(array: np.ndarray[Any, Any], protocol: int) -> None:
    loaded = pickles.load(pickle.dumps([array, array[0].copy()], protocol))
    expected = [array, array[0].copy()]
    assert [(x.dtype, x.tobytes()) for x in loaded] == [(x.dtype, x.tobytes()) for x in expected]


@given(data=st.binary(max_size=60))
def test_any_bytes_are_a_value_or_refused(data: bytes) -> None:
    try:
        pickles.load(b"\x80\x02" + data + b".")
    except ValueError:
        return
