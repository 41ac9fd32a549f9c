"""Files of scripts that know nothing of ranks: rank 0 writes them, and every rank reads its results."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import pickle
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from matex_data.training.launcher import openers
from matex_data.training.launcher.journal import Change
from matex_data.training.launcher.overlay import Overlay
from tests.support.launch import run_script

LAUNCHER = "from matex_data.training.launcher.run import main; main()"
SIZES = [2, pytest.param(3, marks=pytest.mark.slow)]

# Each rank is late at another line, and would write other values: all have to read those of rank 0.
WRITES = """
import json, logging, os, pathlib, pickle, shutil, sqlite3, subprocess, sys, time
import h5py, netCDF4, numpy as np, pandas as pd, xarray as xr, tensorflow as tf
from matex_data import training

rank, size = (int(os.environ._data[name]) for name in (b"PMI_RANK", b"PMI_SIZE"))  # without asking for it
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
try:
    netCDF4.Dataset("x.nc", "w", clobber=False)
except OSError:
    told("UNCLOBBERED", *netCDF4.Dataset("x.nc")["v"][:])
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
open("w.txt").read()
try:
    tf.io.gfile.copy("g.txt", "w.txt")
except tf.errors.AlreadyExistsError:
    told("UNCOPIED", os.path.exists("w.txt"))
late(1)
tf.io.gfile.makedirs("made/deep")  # rank 0 has removed it already
tf.io.gfile.rmtree("made")

late(1)
if os.path.exists("old.txt"):
    os.remove("old.txt")
shutil.rmtree("old")
told("REMOVED", os.path.exists("old.txt"), os.path.exists("old"))
try:
    open("x.npz", "x")
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
    "UNCLOBBERED": ["0.0 0.0 0.0"],
    "XARRAY": ["1.0 2.0"],
    "INSERTED": ["0 1", "1 2"],
    "ROWS": ["0 1"],
    "READ": ["[0 0] 0.0 0 {'rank': 0} {\"n\": 0}"],
    "COUNT": ["3"],
    "RECORDS": ["b'0'"],
    "TENSORFLOW": ["0 b'0'"],
    "UNCOPIED": ["True"],
    "REMOVED": ["False False"],
    "REFUSED": ["True"],
    "CACHE": ["0"],
    "OPEN": ["7 written open.txt"],
}
FILES = (
    "append.log cache.npy copy.json g.txt handler.log open.txt w.txt x.csv x.db x.h5 x.json x.nc x.npy x.npz "
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
    assert {name: sorted(values) for name, values in found.items()} == {
        name: sorted(values * size) for name, values in EXPECTED.items()
    }
    assert done.stderr.count("this script starts processes, at ") == 1
    assert sorted(path.name for path in folder.iterdir()) == FILES.split()
    np.testing.assert_array_equal(np.load(folder / "x.npy"), np.full(4, 2))


OWN = """
import os, pathlib, sys, time
from matex_data import training

os.chdir(sys.argv[1])
with open("before.txt", "w") as file:
    file.write(str(os.environ._data[b"PMI_RANK"]))
if sys.argv[2] == "variable":
    rank = int(os.environ.get("PMI_RANK"))
elif sys.argv[2] == "mpi4py":
    from mpi4py import MPI
    rank = MPI.COMM_WORLD.rank
else:
    rank = training.world().rank
with open(f"own.{rank}", "w") as file:
    file.write(f"{rank}")
if rank == 1:
    pathlib.Path("alone.txt").write_text("written")
training.allreduce([1.0])
texts = [path.read_text() for path in sorted(pathlib.Path().glob("own.*"))]
sys.stdout.write(f"OWN {' '.join(texts)} {open('alone.txt').read()} {open('before.txt').read()}\\n")
"""


@pytest.mark.parametrize(
    "way", ["world", *(pytest.param(way, marks=pytest.mark.slow) for way in ("variable", "mpi4py"))]
)
def test_a_script_that_asks_for_its_rank_writes_its_own_files(way: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(OWN)
    done = run_script(2, LAUNCHER, "--all-output", str(tmp_path / "script.py"), str(tmp_path), way, timeout=60)
    assert done.returncode == 0, done.stderr
    assert re.findall("^OWN (.*)", done.stdout, re.MULTILINE) == ["0 1 written b'0'"] * 2
    assert done.stderr.count("this script asks for its rank, at ") == 1


# Rank 0 is late where files are written, and ahead where they are removed.
LISTS = """
import os, sys, time
import keras, numpy as np, tensorflow as tf
from PIL import Image

rank = int(os.environ._data[b"PMI_RANK"])  # without asking for it
os.chdir(sys.argv[1])


def late(who):
    time.sleep(0.15 if rank == who else 0)


for kind in ("cat", "dog"):
    os.makedirs(f"pets/{kind}")
    for number in range(5):
        late(0)
        Image.fromarray(np.full((4, 4, 3), 40 * number + rank, "uint8")).save(f"pets/{kind}/{number}.png")
for folder, _, names in os.walk("pets"):
    for name in sorted(names):
        with Image.open(f"{folder}/{name}") as image:
            dark = np.asarray(image).mean() < 79
        if dark:
            late(1)
            os.remove(f"{folder}/{name}")
for number in range(5, 7):
    late(0)
    Image.fromarray(np.full((4, 4, 3), 30 * number, "uint8")).save(f"pets/dog/{number}.png")
pets = keras.utils.image_dataset_from_directory("pets", image_size=(4, 4), batch_size=8, shuffle=False, verbose=False)
sys.stdout.write(f"LISTED {*pets.file_paths, float(next(iter(pets))[0].numpy().mean())}\\n")
Image.fromarray(np.zeros((4, 4, 3), "uint8")).save("pets/cat/9.png")
late(0)
Image.fromarray(np.zeros((4, 4, 3), "uint8")).save("pets/cat/10.png")
sys.stdout.write(f"MATCHED {sum(1 for _ in tf.data.Dataset.list_files('pets/*/*.png'))}\\n")
"""


@pytest.mark.parametrize("size", SIZES)
def test_libraries_list_what_a_script_has_written_and_not_what_it_has_removed(size: int, tmp_path: Path) -> None:
    folder, script = tmp_path / "files", tmp_path / "script.py"
    folder.mkdir()
    script.write_text(LISTS)
    done = run_script(size, LAUNCHER, "--all-output", str(script), str(folder), timeout=90)
    assert done.returncode == 0, done.stderr
    kept = [f"pets/{kind}/{i}.png" for kind, numbers in (("cat", range(2, 5)), ("dog", range(2, 7))) for i in numbers]
    assert re.findall("LISTED (.*)", done.stdout) == [str((*kept, 131.25))] * size
    assert re.findall("MATCHED (.*)", done.stdout) == ["10"] * size
    assert [path.name for path in folder.iterdir()] == ["pets"]


# A library that looks whether its files exist, names others at random, and leaves what it has made to the next call.
CACHE = """
import os, uuid


def cached(folder, text):
    path = os.path.join(folder, "value.txt")
    if not os.path.exists(folder):
        os.makedirs(folder, exist_ok=True)
    if not os.path.exists(path):
        with open(draft := f"{path}.{uuid.uuid4()}", "w") as file:
            file.write(text)
        os.replace(draft, path)
    with open(path) as file:
        return file.read()
"""

# Libraries that are not installed: how they are called.
CALLED = {
    "duckdb": "class IOException(Exception):\n    pass\n\n\n"
    "def connect(database, read_only=False):\n    return open(database, 'r' if read_only else 'a')\n",
    "wandb": "def init(mode):\n    return mode\n",
    "cache": CACHE,
}

# Libraries that write and read by themselves: each rank is late at another line, and would write another number.
LIBRARIES = """
import os, sys, time
import ase.db, ase.io, numpy as np, pandas as pd, pyarrow as pa, tensorflow as tf, zarr
import pyarrow.csv, pyarrow.dataset, pyarrow.feather, pyarrow.parquet as pq
import matex_data as md

rank, size = (int(os.environ._data[name]) for name in (b"PMI_RANK", b"PMI_SIZE"))  # without asking for it
os.chdir(sys.argv[1])
sys.path.insert(0, "site-packages")
import duckdb, wandb
from cache import cached


def late(who):
    time.sleep(0.1 if rank == who % size else 0)


def frame(value):
    pd.DataFrame({"x": value}).to_parquet("pandas.parquet")
    yield lambda: pd.read_parquet("pandas.parquet").x


def table(value):
    with pq.ParquetWriter("arrow.parquet", (rows := pa.table({"x": value})).schema) as writer:
        writer.write_table(rows)
    yield lambda: pq.read_table("arrow.parquet")["x"]


def feather(value):
    pa.feather.write_feather(pa.table({"x": value}), "x.feather", compression="uncompressed")
    yield lambda: pa.feather.read_table("x.feather", memory_map=False)["x"]


def text(value):
    pa.csv.write_csv(pa.table({"x": value}), "arrow.csv")
    yield lambda: pa.csv.read_csv("arrow.csv")["x"]


def records(value):
    with pa.OSFile("x.arrow", "wb") as file, pa.ipc.new_file(file, (rows := pa.table({"x": value})).schema) as writer:
        writer.write_table(rows)
    yield lambda: pa.ipc.open_file(pa.memory_map("x.arrow")).read_all()["x"]


def folder(value):
    path = f"parts/{value[0] % 10}"  # which is read lazily
    pa.dataset.write_dataset(pa.table({"x": value}), path, format="ipc")
    yield lambda: pa.dataset.dataset(path, format="ipc").to_table()["x"]


def chunks(value):
    array = zarr.open_array("x.zarr", mode="w", shape=value.shape, chunks=(2,), dtype="i8")
    array[:] = value
    yield lambda: zarr.open_array("x.zarr", mode="r")[:]


def lines(value):
    np.savetxt("x.txt", value)
    yield lambda: np.loadtxt("x.txt")


def saved(value):
    module = tf.Module()
    module.x = tf.Variable(value)
    tf.saved_model.save(module, "module")
    yield lambda: tf.saved_model.load("module").x


def dataset(value):
    path = f"datasets/{value[0] % 10}"  # which is read lazily
    tf.data.Dataset.from_tensor_slices(value).save(path)
    yield lambda: list(tf.data.Dataset.load(path).as_numpy_iterator())


def descriptor(value):
    file = os.open("x.bin", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    os.write(file, value.tobytes())
    os.close(file)
    yield lambda: np.fromfile("x.bin", "i8")


def parts(value):
    os.makedirs("rounds", exist_ok=True)
    pq.write_table(pa.table({"x": value}), f"rounds/{value[0] % 10}.parquet")
    yield lambda: [pa.dataset.dataset("rounds").count_rows() // 6 - 1]


def atoms(value):
    atom, database = ase.Atoms("H", [(value[0], 0, 0)]), ase.db.connect("atoms.db")
    ase.io.write("x.xyz", atom)
    database.write(atom)  # with a lock, and a connection that Python frees late
    yield lambda: ase.io.read("x.xyz").positions[0] if len(database) == value[0] % 10 + 1 else [-1]


def database(value):
    with duckdb.connect("x.duckdb") as file:
        file.write(f"{value[0] // 10}")

    def read():
        with duckdb.connect("x.duckdb", read_only=True) as file:
            text = file.read()
        return [len(text) - 1 if set(text) == {"0"} else text]

    yield read


makes = frame, table, feather, text, records, folder, chunks, lines, saved, dataset, descriptor, parts, atoms, database
for make in makes:
    found = []
    for number in range(3):
        late(number)
        for read in make(np.arange(6) + number + 10 * rank):
            late(number + 1)
            found.append(int(np.asarray(read())[0]))
    sys.stdout.write(f"{make.__name__.upper()} {found}\\n")

sys.stdout.write(f"TRACKED {wandb.init(mode='offline')}\\n")
gfile, found = tf.io.gfile, []
checkpoint = tf.train.Checkpoint(x=tf.Variable(0))
for number in range(3):
    late(number)
    if gfile.exists("trials"):
        gfile.rmtree("trials")
    gfile.makedirs("trials")
    late(number + 1)
    with gfile.GFile(f"trials/{number}.json", "w") as file:
        file.write(str(number))
    checkpoint.x.assign(number)
    checkpoint.save("checkpoints/c")
    checkpoint.x.assign(-1)
    late(number + 2)
    checkpoint.restore(tf.train.latest_checkpoint("checkpoints"))
    listed = gfile.listdir("trials"), gfile.glob("trials/*"), int(checkpoint.x)
    found.append((listed, cached(f"cache/{number}", f"{number} of {rank}")))
sys.stdout.write(f"TENSORFLOW {found}\\n")
for number in range(2):
    checkpoint.write("same")
    time.sleep(0.3 if rank else 0)
    try:
        checkpoint.read("same")
    except md.PartitionError as error:
        sys.stdout.write(f"BEHIND {number} {str(error).splitlines()[0]}\\n")
"""


@pytest.mark.parametrize("size", SIZES)
def test_libraries_read_what_rank_0_has_written_at_the_same_line(size: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LIBRARIES)
    (tmp_path / "files" / "site-packages").mkdir(parents=True)
    for name, code in CALLED.items():
        (tmp_path / "files" / "site-packages" / f"{name}.py").write_text(code)
    options = ["--all-output", str(tmp_path / "script.py"), str(tmp_path / "files")]
    done = run_script(size, LAUNCHER, *options, timeout=120, env={"MATEX_TIMEOUT": "30"})
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = {}
    for name, values in re.findall("^([A-Z]+) (.*)", done.stdout, re.MULTILINE):
        found.setdefault(name, []).append(values)
    steps = [(([f"{i}.json"], [f"trials/{i}.json"], i), f"{i} of 0") for i in range(3)]
    assert found.pop("TENSORFLOW") == [str(steps)] * size
    assert sorted(found.pop("TRACKED")) == ["disabled"] * (size - 1) + ["offline"]
    assert [text[:38] for text in found.pop("BEHIND")] == ["0 rank 0 has written a checkpoint again"[:38]] * (size - 1)
    (makes,) = re.findall("^makes = (.*)", LIBRARIES, re.MULTILINE)
    assert found == {name: ["[0, 1, 2]"] * size for name in makes.upper().split(", ")}
    assert len(list((tmp_path / "files" / "cache").rglob("*"))) == 6


# What scripts of one process do: each rank is late at another line, and would write another number.
HABITS = """
import datetime, glob, logging, os, pathlib, pickle, shutil, sqlite3, sys, tempfile, time
import h5py
from matex_data import training

rank = int(os.environ._data[b"PMI_RANK"])  # without asking for it
copied = [os.environ.copy(), dict(os.environ), {**os.environ}, list(os.environ.items())]


def told(name, *values):
    sys.stdout.write(f"{name} {' '.join(map(str, values))}\\n")


def late(who):
    time.sleep(0.15 if rank == who else 0)


told("SCRIPT", os.path.isabs(__file__), sys.argv[0])
logging.basicConfig(filename="logged.log", format="%(message)s", level=logging.INFO)
logging.info("new")
late(0)
rows = open("rows.csv", "a")  # these three are open when the script ends
rows.write("new\\n")
rows.flush()
told("ROWS", rows.tell(), repr(open("rows.csv").read()))
kept = h5py.File("kept.h5", "a")
kept["new"] = rank
kept.flush()

os.mkdir("runs/1")
late(1)
if os.path.islink("latest"):
    os.remove("latest")
os.symlink("runs/1", "latest")
for number in range(3):
    late(number % 2)
    pathlib.Path("latest/number.txt").write_text(f"{number + 10 * rank}")
    told("LINKED", pathlib.Path("runs/1/number.txt").read_text(), pathlib.Path("run 0/number.txt").read_text())
late(1)
pathlib.Path("older/number.txt").write_text(f"{rank}")
late(0)
told("OLDER", pathlib.Path("runs/0/number.txt").read_text())
os.link("runs/1/number.txt", "hard.txt")
late(1)
pathlib.Path("flag").touch(exist_ok=False)
told("MADE", open("hard.txt").read(), os.path.exists("flag"))
for number in range(2):
    late(number)
    descriptor, name = tempfile.mkstemp(dir=".")
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{number + 10 * rank}")
    os.replace(name, "whole.txt")
    with tempfile.NamedTemporaryFile("w", dir=".", delete=False) as file:
        file.write(f"{number + 10 * rank}")
    os.rename(file.name, "named.txt")
    told("WHOLE", open("whole.txt").read(), open("named.txt").read())

for number in range(3):  # removed by age and size, without a look at their content
    pathlib.Path(f"old-{number}").write_text("x" * (number + 1))
    os.utime(f"old-{number}", (number, number))
for _ in range(3):
    late(1)
    oldest = min(glob.glob("old-*"), key=os.path.getmtime)
    told("OLDEST", oldest, os.path.getsize(oldest))
    os.remove(oldest)
shutil.copytree("runs/1", "moving/inner")
shutil.move("moving", "moved")
late(1)
if os.path.exists("moved/inner/number.txt"):
    told("MOVED", sorted(glob.glob("moved/**", recursive=True)), os.listdir("moved/inner"))
    shutil.rmtree("moved")
try:
    open("cut.txt", "r+")
except FileNotFoundError:
    told("MISSING", "cut.txt" in os.listdir("."), any(name.startswith(b".matex") for name in os.listdir(b".")))
os.makedirs("inside/deep")
late(1)
os.chdir("inside")  # rank 0 has removed it already
pathlib.Path("inner.txt").write_text(f"{rank}")
late(1)
told("INSIDE", os.path.relpath(os.getcwd(), ".."), pathlib.Path("inner.txt").read_text(), os.path.isdir("deep"))
os.chdir("..")
shutil.rmtree("inside")
os.symlink("runs/1", "link")
os.chdir("link/..")
told("ABOVE", os.path.basename(os.getcwd()))
os.chdir("..")
os.remove("link")
for number in range(4):  # a link that was there before the job, and leads elsewhere each time
    late(number % 2)
    names = [sorted(os.listdir("newest")), [entry.name for entry in os.scandir("newest")], glob.glob("newest/*")]
    told("NEWEST", pathlib.Path("newest/number.txt").read_text(), os.path.realpath("newest")[-1], *names,
         os.path.getsize("newest/number.txt"))
    os.mkdir(f"runs/2{number}")
    pathlib.Path(f"runs/2{number}/number.txt").write_text("x" * number + str(rank))
    os.symlink(f"runs/2{number}", "next")
    late(1 - number % 2)
    os.replace("next", "newest")
os.remove("newest")
os.mkdir("going")
late(1)
os.chdir("going")
pathlib.Path("inner.txt").write_text(f"{rank}")
os.rename("../going", "../gone")
late(1)
told("GONE", os.path.basename(os.getcwd()), pathlib.Path("inner.txt").read_text())
os.chdir("..")
shutil.rmtree("gone")
folder = os.open(".", os.O_RDONLY)
lists = [os.listdir(folder), map(os.fsdecode, os.listdir(b".")), [entry.name for entry in os.scandir(folder)],
         [os.fsdecode(entry.path).removeprefix("./") for entry in os.scandir(b".")]]
told("HIDDEN", *{tuple(sorted(names)) == tuple(sorted(os.listdir())) for names in lists},
     any(name.startswith(".matex") for name in os.listdir(folder)))
os.close(folder)
with h5py.File("kept once.h5", "w") as file:
    file["x"] = rank
h5py.File("kept once.h5").close()
late(1)
try:
    h5py.File(name="kept once.h5", mode="w-")
except FileExistsError:
    told("ONCE", h5py.File("kept once.h5")["x"][()])
os.rename(src="kept once.h5", dst="renamed.h5")
late(1)
told("RENAMED", os.path.exists("kept once.h5"), os.path.exists("renamed.h5"))
os.remove(path="renamed.h5")
pathlib.Path("cut.txt").write_text("0123456789")
os.link("cut.txt", "also cut.txt")
told("UNCUT", open("cut.txt").read())
late(1)
os.truncate("cut.txt", 4)
with open("also cut.txt", "a") as file:
    file.write("more")
os.chmod("also cut.txt", 0o600)
told("CUT", open("cut.txt").read(), oct(os.stat("also cut.txt").st_mode))
os.remove("also cut.txt")
shown = open("cut.txt")
shown.read()
with open("cut.txt", "a") as file:
    file.write(" and more")
late(1)
sys.stdout.write(f"SHOWN {shown.read()}\\n" * (rank == 0))
shown.close()
os.remove("cut.txt")
shared = pathlib.Path(sys.argv[1])
late(1)
made = not shared.exists()
shared.write_text(f"{rank}")
late(0)
told("SHARED", made, shared.read_text())
shared.unlink()

late(1)
now, today = datetime.datetime.now(), datetime.date.today()
told("NOW", now, today)


class Stamp(datetime.datetime):
    pass


database = sqlite3.connect(":memory:")
database.execute("create table t (a)")
database.execute("insert into t values (?)", (now,))
told("DATES", pickle.loads(pickle.dumps(now)) == now, type(now).__mro__[1] is type(today), type(Stamp.now()) is Stamp,
     isinstance(now, datetime.datetime), isinstance(today, datetime.datetime), isinstance(now, Stamp),
     type(now) == datetime.datetime, datetime.datetime(2020, 1, 2) == datetime.datetime.fromisoformat("2020-01-02"))
late(0)
with sys.stdin as typed:
    told("TYPED", typed.buffer.read(4), typed.readline().strip(), typed.readlines(1), [*typed])
"""


@pytest.mark.parametrize("size", SIZES)
def test_habits_of_scripts_for_one_process(size: int, tmp_path: Path) -> None:
    folder, shared = tmp_path / "files", Path("/dev/shm", f"matex-test-{tmp_path.parent.name}-{size}")
    (folder / "runs" / "0").mkdir(parents=True)
    (folder / "older").symlink_to("runs/0")
    (folder / "run 0").symlink_to(folder / "runs" / "0")
    (folder / "latest").symlink_to("runs/0")
    (folder / "newest").symlink_to("runs/0")
    (folder / "runs" / "0" / "number.txt").write_text("first")
    for name in ("logged.log", "rows.csv"):
        (folder / name).write_text("old\n")
    with h5py.File(folder / "kept.h5", "w") as file:
        file["old"] = 5
    ended = subprocess.Popen(["true"])
    ended.wait()
    (folder / f".matex-{platform.node()}~{ended.pid}~0").mkdir()  # of a job that was killed
    (folder / "script.py").write_text(HABITS)
    code = f"import os; os.chdir({str(folder)!r}); {LAUNCHER}"
    done = run_script(
        *(size, code, "--all-output", "script.py", str(shared)),
        timeout=90,
        env={"MATEX_TIMEOUT": "30"},
        typed="one\ntwo\nthree\nfour\n",
    )
    assert done.returncode == 0, done.stderr
    assert "asks for its rank" not in done.stderr
    found: dict[str, list[str]] = {}
    for name, values in re.findall("^([A-Z]+) (.*)", done.stdout, re.MULTILINE):
        found.setdefault(name, []).append(values)
    assert len(set(found.pop("NOW"))) == 1
    assert found.pop("SHOWN") == [" and more"]
    lines = {
        "SCRIPT": ["True script.py"],
        "ROWS": ["8 'old\\nnew\\n'"],
        "LINKED": [f"{number} first" for number in range(3)],
        "OLDER": ["0"],
        "MADE": ["2 True"],
        "WHOLE": ["0 0", "1 1"],
        "OLDEST": [f"old-{number} {number + 1}" for number in range(3)],
        "MOVED": ["['moved/', 'moved/inner', 'moved/inner/number.txt'] ['number.txt']"],
        "MISSING": ["False False"],
        "INSIDE": ["inside 0 True"],
        "ABOVE": ["runs"],
        "NEWEST": [
            f"{text} {number} ['number.txt'] ['number.txt'] ['newest/number.txt'] {len(text)}"
            for number, text in [(0, "0"), (0, "0"), (1, "x0"), (2, "xx0")]
        ],
        "GONE": ["gone 0"],
        "HIDDEN": ["True False"],
        "ONCE": ["0"],
        "RENAMED": ["False True"],
        "UNCUT": ["0123456789"],
        "CUT": ["0123more 0o100600"],
        "SHARED": ["True 0"],
        "DATES": ["True True True True False False True True"],
        "TYPED": ["b'one\\n' two ['three\\n'] ['four\\n']"],
    }
    assert {name: sorted(values) for name, values in found.items()} == {
        name: sorted(values * size) for name, values in lines.items()
    }
    assert (folder / "logged.log").read_text() == (folder / "rows.csv").read_text() == "old\nnew\n"
    with h5py.File(folder / "kept.h5") as file:
        assert (file["old"][()], file["new"][()]) == (5, 0)
    assert (folder / "latest").readlink() == Path("runs/1") and (folder / "older").is_symlink()
    names = ("flag", "hard.txt", "kept.h5", "latest", "logged.log", "named.txt", "older", "rows.csv", "run 0", "runs")
    assert sorted(path.name for path in folder.iterdir()) == [*names, "script.py", "whole.txt"]


FAILS = """
import os, sys
from matex_data import training

rank = int(os.environ._data[b"PMI_RANK"])
os.chdir(sys.argv[1])
for number in range(2):
    with open("x.txt", "w") as file:
        file.write("written")
    open("x.txt").read()
os.remove("x.txt")
if sys.argv[2] == "all ranks" or rank == 1:
    raise KeyError(sys.argv[2])
training.allreduce([1.0])
"""


@pytest.mark.parametrize("failing", ["all ranks", "rank 1"])
def test_nothing_is_left_of_what_was_kept_by_a_script_that_fails(failing: str, tmp_path: Path) -> None:
    folder, script = tmp_path / "files", tmp_path / "script.py"
    folder.mkdir()
    script.write_text(FAILS)
    done = run_script(2, LAUNCHER, str(script), str(folder), failing, timeout=60)
    assert done.returncode == 1 and f"KeyError: '{failing}'" in done.stderr
    assert list(folder.iterdir()) == []


SLOW_TO_MOVE = """
import os, sys, time
from matex_data import training
from matex_data.training.launcher.overlay import Overlay

rank, late, pause = int(os.environ._data[b"PMI_RANK"]), sys.argv[2], time.sleep
os.chdir(sys.argv[1])


def slow(call, at_rank):
    def wrapped(*args, **kwargs):
        result = call(*args, **kwargs)
        if rank == at_rank:
            pause(0.2)
        return result

    return wrapped


if late == "rank 0":  # between moving a file away and going on
    os.rename = slow(os.rename, 0)
else:  # between asking where a file is and opening it, or looking at it
    Overlay.look = slow(Overlay.look, 1)

text = open("old.txt").read()
assert text == "old", text
for number in range(3):
    with open("old.txt", "w") as file:
        file.write(f"written {number}")
    text = open("old.txt").read()
    assert text == f"written {number}", text
    with open("old.txt", "a") as file:
        file.write(" and more")
    size = os.path.getsize("old.txt")
    text = open("old.txt").read()
    assert (size, text) == (18, f"written {number} and more"), (size, text)
os.remove("old.txt")
training.allreduce([1.0])
"""


@pytest.mark.parametrize("late", ["rank 0", "rank 1"])
def test_files_that_are_moved_away_while_another_rank_opens_them(late: str, tmp_path: Path) -> None:
    folder, script = tmp_path / "files", tmp_path / "script.py"
    folder.mkdir()
    (folder / "old.txt").write_text("old")
    os.utime(folder / "old.txt", (0, 0))
    script.write_text(SLOW_TO_MOVE)
    done = run_script(2, LAUNCHER, str(script), str(folder), late, timeout=60)
    assert (done.returncode, list(folder.iterdir())) == (0, []), done.stderr


LATE = """
import os, shutil, sys, time
from matex_data import training

rank = int(os.environ._data[b"PMI_RANK"])
os.chdir(sys.argv[1])


def late():
    time.sleep(0.2 * rank)


late()
entries = sorted(os.scandir("."), key=lambda entry: entry.name)
late()
found = [(entry.name, entry.stat().st_size, entry.is_file()) for entry in entries]
assert found == [("a", 1, True), ("b", 2, True)], found
for entry in entries:
    os.rename(entry, f"{entry.path}-{entry.inode() > 0}")
assert not any(os.path.exists(entry) for entry in entries)
os.rename("b-True", "b")
late()
shutil.copy2("b", "c")
os.remove("b")
late()
with open("b", "w") as file:
    file.write("a file")
os.remove("b")
os.mkdir("b")
time.sleep(0 if rank else 0.3)  # now the other rank lists it
shutil.copy2("c", "b")
late()
shutil.copytree("b", "d")
shutil.rmtree("b")
assert sorted(name for name in os.listdir() if name > "b") == ["c", "d"]
training.allreduce([1.0])
"""


def test_a_late_rank_looks_at_files_that_rank_0_has_removed_or_replaced(tmp_path: Path) -> None:
    folder, script = tmp_path / "files", tmp_path / "script.py"
    folder.mkdir()
    for name, text in {"a": "1", "b": "22"}.items():
        (folder / name).write_text(text)
    script.write_text(LATE)
    done = run_script(2, LAUNCHER, str(script), str(folder), timeout=60)
    assert done.returncode == 0, done.stderr


RANDOM_CALLS = """
import json, os, random, shutil, sys, time
from matex_data import training

rank, seed = int(os.environ._data[b"PMI_RANK"]), int(sys.argv[3])
os.chdir(sys.argv[1])
os.makedirs("d")
shared, own = random.Random(seed), random.Random(seed * 10 + rank)
calls = "write append read size exists remove list scan rename copy mkdirs change rmtree".split()
seen = []
for step in range(120):
    if own.random() < 0.25:
        time.sleep(own.random() * 0.02)
    call, text = shared.choice(calls), f"{step}" * shared.randint(1, 4)
    path, other = (shared.choice(["a", "b", "d/x", "d/y"]) for _ in range(2))
    found = None
    try:
        if call in ("write", "append"):
            open(path, call[0]).write(text)
        elif call == "read":
            found = open(path).read()
        elif call == "size":
            found = os.path.getsize(path)
        elif call == "exists":
            found = os.path.exists(path), os.path.isfile(path), os.path.isdir("d")
        elif call == "remove":
            os.remove(path)
        elif call == "list":
            found = sorted(os.listdir(".")), sorted(os.listdir("d"))
        elif call == "scan":
            found = sorted((entry.name, entry.is_file(), entry.stat().st_size) for entry in os.scandir("d"))
        elif call == "rename":
            os.rename(path, other)
        elif call == "copy":
            shutil.copy2(path, other)
        elif call == "mkdirs":
            os.makedirs("d", exist_ok=True)
        elif call == "change":
            with open(path, "r+") as file:
                file.seek(0, 2)
                file.write("+")
                file.seek(0)
                found = file.read()
        elif shared.random() < 0.3:
            shutil.rmtree("d")
    except OSError as error:
        found = type(error).__name__
    seen.append([step, call, path, other, found])
file = os.open(os.path.join(sys.argv[2], f"{rank}.json"), os.O_WRONLY | os.O_CREAT)
os.write(file, json.dumps(seen).encode())
os.close(file)
training.allreduce([1.0])
"""


@pytest.mark.parametrize("seed", [7, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(20, 26))])
def test_random_calls_are_those_of_one_process(seed: int, tmp_path: Path) -> None:
    script, (folder, seen, alone) = tmp_path / "script.py", (tmp_path / name for name in ("files", "seen", "alone"))
    script.write_text(RANDOM_CALLS)
    for made in (folder, seen, alone):
        made.mkdir()
    done = run_script(2, LAUNCHER, str(script), str(folder), str(seen), str(seed), timeout=60)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(folder)
    folder.mkdir()
    plain = f"{RANDOM_CALLS.replace('training.allreduce([1.0])', '')}"
    environment = {**os.environ, "PMI_RANK": "0"}
    command = [sys.executable, "-c", plain, str(folder), str(alone), str(seed)]
    subprocess.run(command, env=environment, check=True, timeout=60)
    wanted = json.loads((alone / "0.json").read_text())
    for rank in range(2):
        assert json.loads((seen / f"{rank}.json").read_text()) == wanted


class _RootThatMakes:
    """Rank 0 that has done nothing when it is asked, and makes a file right afterwards."""

    rank = 1

    def __init__(self, made: Path) -> None:
        self.before_asking: list[Any] = []
        self._made = made

    def serve(self, about: str, reply: Any) -> None:
        """Do nothing: no rank asks this one."""

    def ask(self, about: str, question: Any, take: Any, purpose: str) -> bool:
        taken = bool(take([] if not self._made.exists() else [(0, Change(str(self._made), existed=False, size=0))]))
        self._made.touch()
        return taken


class _RootThatAnswers:
    """Rank 0 by itself."""

    rank = 0

    def serve(self, about: str, reply: Any) -> None:
        """Keep the function that answers other ranks."""
        self.reply = reply


class _RankOf:
    """Rank 1, which asks this rank 0."""

    rank = 1

    def __init__(self, root: _RootThatAnswers) -> None:
        self.before_asking: list[Any] = []
        self._root = root

    def serve(self, about: str, reply: Any) -> None:
        """Do nothing: no rank asks this one."""

    def ask(self, about: str, question: Any, take: Any, purpose: str) -> bool:
        return bool(take(pickle.loads(pickle.dumps(self._root.reply(question)))))

    def is_shared(self) -> bool:
        return True


@pytest.fixture
def two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Overlay, Overlay]]:
    """Return the files of a rank 0 that runs ahead, and those of another rank."""
    monkeypatch.chdir(tmp_path)
    root = _RootThatAnswers()
    ranks = Overlay(root), Overlay(_RankOf(root))  # type: ignore[arg-type]
    yield ranks
    for files in ranks:
        files._remove()
        atexit.unregister(files._end)


def _written(files: Overlay, path: Path, kind: str = "replace", text: str = "") -> None:
    def write(target: str) -> None:
        with Path(target).open("a" if kind == "append" else "w") as file:
            file.write(text or f"{files.rank}")

    files.open(str(path), kind, write)


def _read(files: Overlay, path: Path) -> str:
    return files.open(str(path), "", lambda found: Path(found).read_text())


def test_a_late_rank_sees_a_folder_that_rank_0_has_removed_and_made_once_more(
    two_ranks: tuple[Overlay, Overlay], tmp_path: Path
) -> None:
    folder, (ahead, late) = tmp_path / "results", two_ranks
    folder.mkdir()
    (folder / "log").write_text("old")
    with pytest.raises(FileExistsError):  # as makedirs(exist_ok=True)
        ahead.change(str(folder), folder.mkdir, "make")
    assert _read(ahead, folder / "log") == "old"
    ahead.change(str(folder), lambda: shutil.rmtree(folder), "remove")
    ahead.change(str(folder), folder.mkdir, "make")
    _written(ahead, folder / "log")
    with pytest.raises(FileExistsError):
        late.change(str(folder), folder.mkdir, "make")
    assert late.look(str(folder)).exists and late.names(str(folder), os.listdir) == ["log"]
    assert _read(late, folder / "log") == "old"
    late.change(str(folder), lambda: shutil.rmtree(folder), "remove")
    late.change(str(folder), folder.mkdir, "make")
    assert late.names(str(folder), os.listdir) == []
    _written(late, folder / "log")
    assert _read(late, folder / "log") == "0"


def test_a_late_rank_sees_the_sizes_that_rank_0_has_seen(two_ranks: tuple[Overlay, Overlay], tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("12")
    two_ranks[1].view(str(log), os.path.getsize)
    sizes: list[list[int]] = []
    for files in two_ranks:
        sizes.append([])
        for _ in range(3):
            sizes[-1].append(files.view(str(log), os.path.getsize) if files.rank else log.stat().st_size)
            _written(files, log, "append", "345")
    assert sizes == [[2, 5, 8], [2, 5, 8]]


def test_a_folder_that_rank_0_has_looked_at_and_saves_into_is_one_for_late_ranks(
    two_ranks: tuple[Overlay, Overlay], tmp_path: Path
) -> None:
    """A file of the folder's size stood in for it."""
    folder, (ahead, late) = tmp_path / "checkpoints", two_ranks
    folder.mkdir()
    (folder / "first").write_text("1")
    ahead.view(str(folder), os.path.isdir)
    ahead.change(str(folder), (folder / "second").touch, "replace")
    assert late.view(str(folder), os.path.isdir) and _read(late, folder / "first") == "1"


def test_a_folder_that_rank_0_has_loaded_and_saves_into_is_kept(
    two_ranks: tuple[Overlay, Overlay], tmp_path: Path
) -> None:
    """Python said that it is a directory."""
    folder, (ahead, late) = tmp_path / "model", two_ranks
    folder.mkdir()
    (folder / "weights").write_text("old")
    load = lambda target: Path(target, "weights").read_text()  # noqa: E731
    ahead.open(str(folder), "", load)
    ahead.change(str(folder), lambda: (folder / "weights").write_text("new"), "replace")
    assert late.open(str(folder), "", load) == "old"


def test_a_file_that_rank_0_has_looked_at_is_written_in_a_folder_that_is_not_to_be_written(
    two_ranks: tuple[Overlay, Overlay], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be kept there; the script does not fail for that."""
    log, access, (ahead, _) = tmp_path / "log", os.access, two_ranks
    log.write_text("1")
    ahead.view(str(log), os.path.exists)
    monkeypatch.setattr(os, "access", lambda path, mode: path != str(tmp_path) and access(path, mode))
    monkeypatch.setattr(ahead, "_keeping_folder", lambda parent: Path("/proc/no").mkdir())
    _written(ahead, log, "append", "2")
    assert log.read_text() == "12"


@pytest.mark.parametrize("kind", ["replace", "append"])
def test_an_interrupt_while_a_file_is_kept_leaves_it(
    two_ranks: tuple[Overlay, Overlay], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path, rename, (ahead, _) = tmp_path / "file", os.rename, two_ranks
    path.write_text("old")
    _read(ahead, path)

    def interrupted(source: str, target: str) -> None:
        rename(source, target)
        if source == str(path):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "rename", interrupted)
        _written(ahead, path, kind, "new")
    assert path.read_text() == "old"


@pytest.mark.parametrize("kind", ["replace", "append"])
def test_a_file_that_rank_0_has_renamed_and_written_since_is_as_it_was(
    two_ranks: tuple[Overlay, Overlay], tmp_path: Path, kind: str
) -> None:
    path, other, (ahead, late) = tmp_path / "file", tmp_path / "other", two_ranks
    path.write_text("old")
    for files in (ahead, late):
        assert _read(files, path) == "old"
        files.change(str(other), lambda: path.rename(other), "remove", str(path))
        _written(files, other, kind, "new")
        assert _read(files, other) == ("oldnew" if kind == "append" else "new")


def test_a_file_that_rank_0_alone_has_still_open_is_the_copy_meanwhile(
    two_ranks: tuple[Overlay, Overlay], tmp_path: Path
) -> None:
    """Python may close it late, when it frees memory: the rank waited, or saw what rank 0 wrote later."""
    path, (ahead, late) = tmp_path / "rows", two_ranks
    with contextlib.ExitStack() as held:
        for _ in range(2):
            file = ahead.open(str(path), "change", lambda target: held.enter_context(Path(target).open("a")))
            file.write("0")
        _written(late, path, "change", "1")
        assert _read(late, path) == "1"
    _written(late, path, "change", "1")
    assert _read(late, path) == "00"


def test_a_folder_is_loaded_with_the_files_that_rank_0_saw_in_it(
    two_ranks: tuple[Overlay, Overlay], tmp_path: Path
) -> None:
    folder, (ahead, late) = tmp_path / "parts", two_ranks
    (folder / "of").mkdir(parents=True)

    def load(files: Overlay) -> dict[str, str]:
        def read(target: str) -> dict[str, str]:
            return {path.name: path.read_text() for path in Path(target).rglob("*") if path.is_file()}

        return files.open(str(folder), "", read)

    for files in (ahead, late):
        for number in range(2):
            _written(files, folder / "of" / "a", text=f"{number + 10 * files.rank}")
            assert load(files) == {"a": f"{number}", **({"b": "0"} if number else {})}
            _written(files, folder / "b")


def test_what_rank_0_makes_or_appends_meanwhile_is_not_seen(two_ranks: tuple[Overlay, Overlay], tmp_path: Path) -> None:
    path, (ahead, late) = tmp_path / "file", two_ranks
    calls: list[str] = []

    def found(target: str) -> int | None:
        calls.append(target)
        if len(calls) == 1:
            ahead.view(str(path), os.path.exists)
            _written(ahead, path, "append", "more")
        return Path(target).stat().st_size if Path(target).exists() else None

    assert late.view(str(path), found) is None
    _written(late, path, "append", "more")
    calls.clear()
    assert late.view(str(path), found) == 4


def test_a_file_that_rank_0_removes_meanwhile_is_not_written_by_another_rank(
    two_ranks: tuple[Overlay, Overlay], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, access, (ahead, late) = tmp_path / "file", os.access, two_ranks
    path.write_text("old")

    def slow_access(at: str, mode: int) -> bool:
        if Path(at) == path and path.exists():
            _written(ahead, path)
            ahead.change(at, path.unlink, "remove")
        return access(at, mode)

    monkeypatch.setattr(os, "access", slow_access)
    _written(late, path)
    assert not path.exists() and late.look(str(path)).exists


def test_a_folder_that_rank_0_has_made_since_is_not_there_to_write_into(
    two_ranks: tuple[Overlay, Overlay], tmp_path: Path
) -> None:
    """The late rank wrote, and had the error of rank 0 when it next looked."""
    path, (ahead, late) = tmp_path / "made" / "file", two_ranks
    for files in (ahead, late):
        with pytest.raises(FileNotFoundError):
            _written(files, path)
        files.change(str(path.parent), path.parent.mkdir, "make")
        _written(files, path)
    assert _read(late, path) == "0"


def test_a_folder_that_rank_0_removes_meanwhile_can_be_entered_and_changed(
    two_ranks: tuple[Overlay, Overlay], tmp_path: Path
) -> None:
    folder, (ahead, late) = tmp_path / "folder", two_ranks
    found: list[str] = []

    def find(target: str) -> None:
        if len(found) % 2 == 0:
            ahead.change(str(folder), folder.rmdir, "remove")
        found.append(target)
        Path(target).stat()

    for look in (functools.partial(openers._chdir, late, find), lambda path: late.touch(path, find)):
        folder.mkdir()
        look(str(folder))
        late.change(str(folder), folder.rmdir, "remove")
    assert len(found) == 4 and not folder.exists()


def test_a_save_into_a_folder_leaves_the_open_files_of_it_alone(
    two_ranks: tuple[Overlay, Overlay], tmp_path: Path
) -> None:
    log, (ahead, late) = tmp_path / "log", two_ranks
    with (
        ahead.open(str(log), "replace", lambda target: Path(target).open("w")) as file,
        late.open(str(log), "replace", lambda target: Path(target).open("w")),
    ):
        for files in two_ranks:
            files.change(str(tmp_path), lambda: None, "replace")  # as by a CheckpointManager
            files.change(str(log), log.touch, "make")
        assert late.is_private(str(log))
        file.write("all")
    assert _read(late, log) == "all"


def test_other_ranks_do_not_see_the_temporary_files_of_rank_0(
    two_ranks: tuple[Overlay, Overlay], tmp_path: Path
) -> None:
    """The list of the folder had them until rank 0 had renamed them."""
    ahead, late = two_ranks
    made = [Path(ahead.make_alone(lambda: tempfile.mkdtemp(dir=tmp_path), str)) for _ in range(2)]
    ahead.change(str(tmp_path / "kept"), lambda: made[0].rename(tmp_path / "kept"), "remove", str(made[0]))
    assert made[1].is_dir() and late.names(str(tmp_path), os.listdir) == []


def test_rank_0_is_asked_once_about_a_file_that_nobody_changes(
    two_ranks: tuple[Overlay, Overlay], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (ahead, late), path, purposes = two_ranks, tmp_path / "log", list[str]()
    ask = late.root.ask
    monkeypatch.setattr(late.root, "ask", lambda *given: purposes.append(given[-1]) or ask(*given))
    assert [late.look(str(path)).exists for _ in range(3)] == [False] * 3 and len(purposes) == 1
    _written(ahead, path)
    assert [late.look(str(path)).exists for _ in range(3)] == [False] * 3 and len(purposes) == 2
    _written(late, path)
    assert _read(late, path) == "0"
    _written(ahead, path, text="later")
    _written(late, path)
    assert _read(late, path) == "later"


def test_the_error_of_a_call_that_has_begun_a_file_is_raised_once(
    two_ranks: tuple[Overlay, Overlay], tmp_path: Path
) -> None:
    table = tmp_path / "table.txt"
    for files in two_ranks:
        with pytest.raises(TypeError):
            files.open(str(table), "replace", lambda target: np.savetxt(target, np.array(["a"]), fmt="%d"))
    assert _read(two_ranks[1], table) == ""


def test_ranks_are_told_of_changes_that_they_do_not_know(tmp_path: Path) -> None:
    root, path = _RootThatAnswers(), str(tmp_path / "rows.csv")
    files = Overlay(root)  # type: ignore[arg-type]
    for _ in range(3):
        files.open(path, "append", lambda target: Path(target).open("a").close())
    with files.open(str(tmp_path / "held.csv"), "replace", lambda target: Path(target).open("w")):
        assert [(number, change.closed) for number, change in root.reply((1, []))] == [(1, True), (2, True), (3, False)]
        assert [number for number, _ in root.reply((4, [3]))] == [3]
    assert [(number, change.closed) for number, change in root.reply((4, [3]))] == [(3, True)]


def test_rank_0_copies_no_folder_that_is_made_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = Overlay(_RootThatAnswers())  # type: ignore[arg-type]
    (tmp_path / "results").mkdir()
    with pytest.raises(FileExistsError):
        files.change(str(tmp_path / "results"), (tmp_path / "results").mkdir, "make")
    assert [path.name for path in tmp_path.iterdir()] == ["results"]


def test_a_file_that_rank_0_makes_while_this_rank_looks_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "split.npy"
    files = Overlay(_RootThatMakes(path))  # type: ignore[arg-type]
    assert not files.look(str(path)).exists
    assert path.exists() and not files.look(str(path)).exists


UNEQUAL = """
import datetime, fcntl, logging.handlers, os, pathlib, secrets, subprocess, sys, time, uuid
import numpy as np

rank = int(os.environ._data[b"PMI_RANK"])
os.chdir(sys.argv[1])


def told(name, *values):
    sys.stdout.write(f"{name} {' '.join(map(str, values))}\\n")


def late(who):
    time.sleep(0.3 if rank == who else 0)


late(1)
made = not os.path.exists("split.npy")
if made:  # rank 0 has made it long before rank 1 looks
    np.save("split.npy", np.random.permutation(4))
told("MADE", made, np.load("split.npy"))
for _ in range(2):
    late(1)
    folder = f"runs/exp{1 + len(os.listdir('runs'))}"
    os.makedirs(folder)
    told("EXP", folder)
late(1)
os.makedirs(os.path.join("clock", datetime.datetime.now().strftime(f"%H%M%S.%f-{uuid.uuid4()}-{secrets.token_hex(4)}")))
told("CLOCK", *sorted(os.listdir("clock")), time.strftime("%H") == f"{datetime.datetime.now():%H}")
time.sleep(1 if rank == 1 else 0)  # whole seconds name the files
told("ROLLED", logging.handlers.TimedRotatingFileHandler("clock.log", when="S", delay=True).rolloverAt)
end, steps = time.time() + 0.2, 0
while time.time() < end:
    time.sleep(0.01 + 0.02 * rank)
    steps += 1
told("STEPS", steps)
with open("counter.txt") as file:
    count = int(file.read())
late(1)
with open("counter.txt", "w") as file:
    file.write(str(count + 1))
told("COUNT", count, open("counter.txt").read())
if os.path.exists("old.txt"):
    os.remove("old.txt")
    told("OLD", "removed")
late(0)
told("TYPED", input(), sys.stdin.readline().strip(), sys.stdin.read())
lock = os.open("lock", os.O_CREAT | os.O_RDWR)
fcntl.flock(lock, fcntl.LOCK_EX)
with open("lock2", "w") as other:
    fcntl.flock(other, fcntl.LOCK_EX)
    from matex_data import training
    training.allreduce([1.0])
told("LOCKED", True)
code = "import sys, os; print(sys.stdin.read() == '' or os.environ['PMI_RANK'])"
told("CHILD", os.system(f"{sys.executable} -c 'import sys; sys.stdin.read()'"), rank and
     subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True).stdout.strip())
"""


@pytest.mark.parametrize("size", SIZES)
def test_ranks_see_what_rank_0_saw_at_the_same_line(size: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(UNEQUAL)
    (tmp_path / "runs").mkdir()
    (tmp_path / "clock").mkdir()
    (tmp_path / "counter.txt").write_text("5")
    (tmp_path / "old.txt").touch()
    options = ["--all-output", str(tmp_path / "script.py"), str(tmp_path)]
    done = run_script(size, LAUNCHER, *options, timeout=60, env={"MATEX_TIMEOUT": "30"}, typed="one\ntwo\nthree\n")
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = {}
    for name, values in re.findall("^([A-Z]+) (.*)", done.stdout, re.MULTILINE):
        found.setdefault(name, []).append(values)
    split = found.pop("MADE")
    assert len(set(split)) == 1
    assert split[0].startswith("True")
    assert sorted(found.pop("EXP")) == sorted(["runs/exp1", "runs/exp2"] * size)
    assert len(set(found.pop("CLOCK"))) == 1
    assert len(set(found.pop("ROLLED"))) == 1
    assert len(set(found.pop("STEPS"))) == 1
    assert sorted(found.pop("CHILD")) == ["0 0", *["0 True"] * (size - 1)]
    assert found == {
        "COUNT": ["5 6"] * size,
        "OLD": ["removed"] * size,
        "TYPED": ["one two three"] * size,
        "LOCKED": ["True"] * size,
    }
    assert len(list((tmp_path / "clock").iterdir())) == 1
    assert (tmp_path / "counter.txt").read_text() == "6"
    assert not list(tmp_path.glob(".matex*"))


LONE = """
import os, sys, time

rank = int(os.environ._data[b"PMI_RANK"])
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


@pytest.mark.parametrize("case", ["busy", pytest.param("kept open", marks=pytest.mark.slow)])
def test_a_wait_for_rank_0_ends(case: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LONE)
    done = run_script(
        2, LAUNCHER, str(tmp_path / "script.py"), str(tmp_path), case, timeout=90, env={"MATEX_TIMEOUT": "3"}
    )
    assert done.returncode != 0
    path = str(tmp_path / "x.txt")
    assert f"go on with {path!r}, which rank 0 writes, and has waited 3 s for rank 0" in done.stderr
    assert f"this rank is at {tmp_path / 'script.py'}, line " in done.stderr
