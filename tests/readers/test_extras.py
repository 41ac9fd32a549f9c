"""Packages that one format alone needs: without them, errors have the install command, and other formats work."""

from __future__ import annotations

import configparser
import subprocess
import sys

import h5py
import numpy as np
import pytest

from matex_data.readers import FORMATS
from tests.support.launch import ROOT, environment

WITHOUT = """
import sys
sys.modules.update(pyarrow=None, hdf5plugin=None)  # imports of these fail
from mpi4py import MPI
from matex_data import FormatError, open_dataset
for path in sys.argv[1:]:
    try:
        print(len(open_dataset(path, inputs="x" if path.endswith("h5") else None, comm=MPI.COMM_SELF)))
    except FormatError as error:
        print(error)
    print("====")
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what a process without the extras prints for each file."""
    folder = tmp_path_factory.mktemp("files")
    np.save(folder / "a.npy", np.arange(7))
    (folder / "a.csv").write_text("x,y\n1,2\n")
    (folder / "table").write_text("x,y\n1,2\n")
    with h5py.File(folder / "gzip.h5", "w") as file:
        file.create_dataset("x", data=np.arange(9), chunks=(4,), compression=1)
    with h5py.File(folder / "zfp.h5", "w") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((4,))
        plist.set_filter(32013, h5py.h5z.FLAG_OPTIONAL, (0,) * 6)
        space = h5py.h5s.create_simple((8,))
        made = h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_INT32, space, plist)
        made.write_direct_chunk((0,), b"compressed")
    names = ["a.npy", "a.csv", "table", "gzip.h5", "zfp.h5"]
    command = [sys.executable, "-c", WITHOUT, *(str(folder / name) for name in names)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return dict(zip(names, done.stdout.split("====\n"), strict=False))


def test_other_formats_work(outputs: dict[str, str]) -> None:
    assert (outputs["a.npy"], outputs["gzip.h5"]) == ("7\n", "9\n")


def test_a_text_table_needs_an_extra(outputs: dict[str, str]) -> None:
    assert "the reader of 'csv' files needs a package that is not installed" in outputs["a.csv"]
    assert "a.csv" in outputs["a.csv"] and "expected: the package 'pyarrow'" in outputs["a.csv"]
    assert "remedy: python -m pip install 'flatbuffers" in outputs["a.csv"]
    assert "cannot tell the format" in outputs["table"]


def test_a_filter_of_hdf5plugin_needs_an_extra(outputs: dict[str, str]) -> None:
    assert "a filter that is not installed" in outputs["zfp.h5"] and "32013" in outputs["zfp.h5"]
    assert "python -m pip install 'hdf5plugin>=5'  (the extra matex_data[hdf5]), or" in outputs["zfp.h5"]


def test_extras_of_the_formats_exist() -> None:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    extras = parser["options.extras_require"]
    required = {format.extra for format in FORMATS.values() if format.extra}
    required |= {"matex_data[hdf5]", "matex_data[icechunk]", "matex_data[remote]"}
    assert required == {f"matex_data[{name}]" for name in extras["all"].partition("[")[2].rstrip("]").split(",")}
    assert "[all," in extras["demo"] and all("[demo," in extras[name] for name in ("bench", "test"))
    always = {line.partition(">")[0] for line in parser["options"]["install_requires"].split()}
    assert {"tensorflow", "mpi4py", "h5py", "numpy", "pillow", "netCDF4"} <= always
    assert not {"pyarrow", "hdf5plugin"} & always
