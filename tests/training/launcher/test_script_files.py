"""Files of scripts that know nothing of ranks: rank 0 writes them, and every rank reads its results."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from matex_data.training.launcher.script_files import is_named_by_rank
from tests.support.launch import run_script

LAUNCHER = "from matex_data.training.launcher.run import main; main()"
SIZES = [2, pytest.param(3, marks=pytest.mark.slow)]

# Each rank is late at another line, and would write other values: all have to read those of rank 0.
WRITES = """
import json, logging, os, pathlib, pickle, shutil, sqlite3, subprocess, sys, time
import h5py, netCDF4, numpy as np, pandas as pd, xarray as xr, tensorflow as tf
from matex_data import training

rank, size = training.world().rank, training.world().size
os.chdir(sys.argv[1])
log = logging.getLogger("script")
log.addHandler(logging.FileHandler("handler.log"))


def told(name, *values):
    sys.stdout.write(f"{name} {' '.join(map(str, values))}\\n")


def late(who):
    time.sleep(0.15 if rank == who else 0)


for line in range(3):
    late(line % size)
    with open("append.log", "a") as file:
        file.write(f"line {line} at {file.tell()}\\n")
    log.warning("line %d", line)
late(0)
told("APPENDED", open("append.log").read().splitlines())
told("HANDLED", pathlib.Path("handler.log").read_text().split("\\n")[:-1])

for value in range(3):  # written again after it was read
    late(value % size)
    np.save("x.npy", np.full(4, value + 10 * rank))
    late((value + 1) % size)
    told("SAVED", value, np.load("x.npy")[0], os.path.getsize("x.npy"))

with h5py.File("x.h5", "w") as file:
    file["x"] = np.arange(5) + 10 * rank
late(0)
with h5py.File("x.h5", "a") as file:
    file["y"] = file["x"][:] * 2
with h5py.File("x.h5") as file:
    told("HDF", *file["x"][:], *file["y"][:])
with netCDF4.Dataset("x.nc", "w") as file:
    file.createDimension("n", 3)
    file.createVariable("v", "f4", ("n",))[:] = rank
late(1)
told("NETCDF", *netCDF4.Dataset("x.nc")["v"][:])
xr.Dataset({"a": ("x", [1.0 + rank, 2.0])}).to_netcdf("y.nc")
late(0)
told("XARRAY", *xr.open_dataset("y.nc")["a"].values)

for value in range(2):
    late(value % size)
    database = sqlite3.connect("x.db")
    database.execute("create table if not exists t (v)")
    database.execute("insert into t values (?)", (value + 10 * rank,))
    database.commit()
    told("INSERTED", value, database.execute("select count(*) from t").fetchone()[0])
    database.close()
database = sqlite3.connect("x.db")
told("ROWS", *[row[0] for row in database.execute("select v from t")])
database.close()

np.savez("x.npz", a=np.full(2, rank))
np.savetxt("x.txt", np.full((2, 2), rank))
pd.DataFrame({"a": [rank]}).to_csv("x.csv", index=False)
with open("x.pkl", "wb") as file:
    pickle.dump({"rank": rank}, file)
pathlib.Path("x.json").write_text(json.dumps({"n": 0}))
shutil.copy("x.json", "copy.json")
late(0)
told("READ", np.load("x.npz")["a"], np.loadtxt("x.txt")[0, 0], pd.read_csv("x.csv").a[0],
     pickle.load(open("x.pkl", "rb")), pathlib.Path("copy.json").read_text())
for value in range(3):  # read, changed and replaced by a new file
    late(value % size)
    state = json.load(open("x.json"))
    with open("x.json.new", "w") as file:
        json.dump({"n": state["n"] + 1}, file)
    os.replace("x.json.new", "x.json")
told("COUNT", json.load(open("x.json"))["n"])

with tf.io.TFRecordWriter("x.tfrecord") as writer:
    writer.write(b"%d" % rank)
late(0)
told("RECORDS", *[record.numpy() for record in tf.data.TFRecordDataset("x.tfrecord")])
with tf.io.gfile.GFile("g.txt", "w") as file:
    file.write(f"{rank}")
tf.io.write_file("w.txt", f"{rank}")
late(0)
told("TENSORFLOW", tf.io.gfile.GFile("g.txt").read(), tf.io.read_file("w.txt").numpy())

late(1)
if os.path.exists("old.txt"):
    os.remove("old.txt")
shutil.rmtree("old")
told("REMOVED", os.path.exists("old.txt"), os.path.exists("old"))
with open(f"own.{rank}", "w") as file:
    file.write(f"{rank}")
if rank == size - 1:
    pathlib.Path("alone.txt").write_text("written")
training.allreduce([1.0])
told("OWN", *sorted(path.read_text() for path in pathlib.Path().glob("own.*")), open("alone.txt").read())
try:
    open("own.0", "x")
except FileExistsError:
    told("REFUSED", True)
if not os.path.exists("cache.npy"):
    with open("cache.npy", "wb") as file:
        np.save(file, np.full(3, rank))
        file.flush()
        late(0)
told("CACHE", np.load("cache.npy")[0])
with open("open.txt", "w") as file:
    file.write("written")
    file.flush()
    late(0)
    told("OPEN", os.path.getsize("open.txt"), open("open.txt").read(), file.name)
if rank == 0:
    subprocess.run([sys.executable, "-c", "print()"], check=True)
"""
EXPECTED = {
    "APPENDED": ["['line 0 at 0', 'line 1 at 12', 'line 2 at 25']"],
    "HANDLED": ["['line 0', 'line 1', 'line 2']"],
    "SAVED": ["0 0 160", "1 1 160", "2 2 160"],
    "HDF": ["0 1 2 3 4 0 2 4 6 8"],
    "NETCDF": ["0.0 0.0 0.0"],
    "XARRAY": ["1.0 2.0"],
    "INSERTED": ["0 1", "1 2"],
    "ROWS": ["0 1"],
    "READ": ["[0 0] 0.0 0 {'rank': 0} {\"n\": 0}"],
    "COUNT": ["3"],
    "RECORDS": ["b'0'"],
    "TENSORFLOW": ["0 b'0'"],
    "REMOVED": ["False False"],
    "REFUSED": ["True"],
    "CACHE": ["0"],
    "OPEN": ["7 written open.txt"],
}
FILES = (
    "alone.txt append.log cache.npy copy.json g.txt handler.log open.txt w.txt x.csv x.db x.h5 x.json x.nc x.npy x.npz "
    "x.pkl x.tfrecord x.txt y.nc"
)


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_reads_what_rank_0_writes(size: int, tmp_path: Path) -> None:
    """One job for all kinds of files, since a job takes seconds to start."""
    folder, script = tmp_path / "files", tmp_path / "script.py"
    (folder / "old").mkdir(parents=True)
    for name in ("old/a", "old.txt"):
        (folder / name).touch()
    script.write_text(WRITES)
    options = ["--all-output", str(script), str(folder)]
    done = run_script(size, LAUNCHER, *options, timeout=200, env={"MATEX_TIMEOUT": "30"})
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = {}
    for name, values in re.findall("^([A-Z]+) (.*)", done.stdout, re.MULTILINE):
        found.setdefault(name, []).append(values)
    assert found.pop("OWN") == [f"{' '.join(map(str, range(size)))} written"] * size
    assert {name: sorted(values) for name, values in found.items()} == {
        name: sorted(values * size) for name, values in EXPECTED.items()
    }
    assert done.stderr.count("this script starts processes, at ") == 1
    own = [f"own.{rank}" for rank in range(size)]
    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES.split(), *own])
    np.testing.assert_array_equal(np.load(folder / "x.npy"), np.full(4, 2))


LONE = """
import os, sys, time
from matex_data import training

rank = training.world().rank
os.chdir(sys.argv[1])
if sys.argv[2] == "busy" and rank == 0:
    time.sleep(60)
if sys.argv[2] == "kept open" and rank == 0:
    kept = open("x.txt", "w")
    time.sleep(60)
if rank == 1:
    open("x.txt", "w").close()
    print(open("x.txt").read())
"""


@pytest.mark.parametrize(
    ("case", "purpose"),
    [("busy", "write, rename or remove"), pytest.param("kept open", "write, rename or remove", marks=pytest.mark.slow)],
)
def test_a_wait_for_rank_0_ends(case: str, purpose: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LONE)
    done = run_script(
        2, LAUNCHER, str(tmp_path / "script.py"), str(tmp_path), case, timeout=90, env={"MATEX_TIMEOUT": "3"}
    )
    assert done.returncode != 0
    assert f"this rank is to {purpose} {str(tmp_path / 'x.txt')!r}, and has waited 3 s for rank 0" in done.stderr
    assert f"this rank is at {tmp_path / 'script.py'}, line " in done.stderr


REPLACED = """
import os, sys, time
from matex_data import training

os.chdir(sys.argv[1])
if training.world().rank == 1:
    time.sleep(6)  # longer than rank 0 waits for it
text = open("x.txt").read()
with open("x.txt", "w") as file:
    file.write("changed")
"""


def test_reading_a_file_that_rank_0_has_replaced_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("as it was")
    (tmp_path / "script.py").write_text(REPLACED)
    options = [str(tmp_path / "script.py"), str(tmp_path)]
    done = run_script(2, LAUNCHER, *options, timeout=90, env={"MATEX_TIMEOUT": "3"})
    assert done.returncode != 0
    assert f"rank 0 has replaced {str(tmp_path / 'x.txt')!r} before this rank read it" in done.stderr
    assert "training.allreduce([0.0])" in done.stderr


@pytest.mark.parametrize(
    ("of_root", "path", "rank", "expected"),
    [
        ("/a/log.0", "/a/log.2", 2, True),
        ("/a/0/x_000.npy", "/a/2/x_002.npy", 2, True),
        ("/a/log.0", "/a/log.1", 2, False),
        ("/a/log.1", "/a/log.2", 2, False),
        ("/a/one", "/a/two", 2, False),
        ("/a/0", "/a/0", 0, False),
        ("/a/0/x", "/a/2/y", 2, False),
    ],
)
def test_paths_that_are_named_by_rank(of_root: str, path: str, rank: int, expected: bool) -> None:
    assert is_named_by_rank(of_root, path, rank) == expected
