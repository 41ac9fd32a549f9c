"""Nothing in a file leads elsewhere: each way by which a file names another one is refused, unless that is trusted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import h5py
import icechunk
import netCDF4
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tifffile
import zarr
from mpi4py import MPI
from PIL import Image

import matex_data as md
from matex_data.errors import DataError, FormatError
from matex_data.opening.given import expand
from matex_data.readers.hdf5.files import open_file
from matex_data.storage.trust import VARIABLE, Trust, trees_of
from tests.support.launch import ROOT
from tests.support.ranks import Pools

X = np.arange(12.0)
PASSWD = "/etc/passwd"


class Case(NamedTuple):
    """File that leads elsewhere.

    Parameters
    ----------
    path : of the file.
    target : that the error names.
    trusted : what makes it readable, or leads to another error.
    options : of `open_dataset`.
    expected : values of "x" if it is trusted; None: it is no data.
    """

    path: Path
    target: str
    trusted: str
    options: Mapping[str, Any] = MappingProxyType({})
    expected: Any = X


def _raw(outside: Path) -> Path:
    X.tofile(outside / "raw.bin")
    return outside / "raw.bin"


def _external(path: Path, raw: str, name: str = "x") -> Path:
    with h5py.File(path, "a") as file:
        file.create_dataset(name, X.shape, "f8", external=[(raw, 0, X.nbytes)])
    return path


def _virtual(path: Path, source: str, inner: str = "x") -> Path:
    layout = h5py.VirtualLayout(X.shape, "f8")
    layout[:] = h5py.VirtualSource(source, inner, X.shape)
    with h5py.File(path, "a") as file:
        file.create_virtual_dataset("x", layout)
    return path


def hdf5_raw(inside: Path, outside: Path) -> Case:
    """External raw data."""
    return Case(_external(inside / "a.h5", str(_raw(outside))), str(outside / "raw.bin"), str(outside))


def hdf5_passwd(inside: Path, outside: Path) -> Case:
    """External raw data that is a file of the system."""
    with h5py.File(inside / "a.h5", "w") as file:
        file.create_dataset("x", (8,), "u1", external=[(PASSWD, 0, 8)])
    return Case(inside / "a.h5", PASSWD, "/etc", {}, np.frombuffer(Path(PASSWD).read_bytes()[:8], "u1"))


def hdf5_raw_above(inside: Path, outside: Path) -> Case:
    """Raw data named by ``../``."""
    _raw(outside)
    return Case(_external(inside / "a.h5", "../outside/raw.bin"), "outside/raw.bin", str(outside))


def hdf5_raw_behind_symlink(inside: Path, outside: Path) -> Case:
    """Raw data in the tree by name, which is a symbolic link out of it."""
    (inside / "raw.bin").symlink_to(_raw(outside))
    return Case(_external(inside / "a.h5", "raw.bin"), "raw.bin", str(outside))


def hdf5_virtual_raw(inside: Path, outside: Path) -> Case:
    """Virtual dataset of a file that is not HDF5."""
    path = _virtual(inside / "a.h5", str(_raw(outside)))
    return Case(path, str(outside / "raw.bin"), str(outside), {}, None)


def hdf5_virtual_of_external(inside: Path, outside: Path) -> Case:
    """Virtual dataset of an HDF5 file in the tree whose raw data are not."""
    _external(inside / "b.h5", str(_raw(outside)))
    return Case(_virtual(inside / "a.h5", "b.h5"), str(outside / "raw.bin"), str(outside))


def hdf5_link(inside: Path, outside: Path) -> Case:
    """External link to a file that is not HDF5."""
    with h5py.File(inside / "a.h5", "w") as file:
        file["x"] = h5py.ExternalLink(str(_raw(outside)), "x")
    return Case(inside / "a.h5", str(outside / "raw.bin"), str(outside), {"inputs": "x"}, None)


def hdf5_link_of_link(inside: Path, outside: Path) -> Case:
    """Soft link to an external link in a group of another file, whose raw data lie elsewhere."""
    _external(inside / "b.h5", str(_raw(outside)), "group/x")
    with h5py.File(inside / "a.h5", "w") as file:
        file["soft"] = h5py.SoftLink("./deep//./link")
        file["deep/link"] = h5py.ExternalLink("b.h5", "group")
    return Case(inside / "a.h5", str(outside / "raw.bin"), str(outside), {"inputs": "soft/x"})


def nexus(inside: Path, outside: Path) -> Case:
    """Master of a beamline with a link to one of its data files that is none."""
    with h5py.File(inside / "run_master.nxs", "w") as file:
        entry = file.create_group("entry")
        entry.attrs["NX_class"] = "NXentry"
        entry["data/data_000001"] = h5py.ExternalLink(str(_raw(outside)), "entry/data/data")
    options = {"inputs": "entry/data/data_000001"}
    return Case(inside / "run_master.nxs", str(outside / "raw.bin"), str(outside), options, None)


def netcdf_coordinate(inside: Path, outside: Path) -> Case:
    """NetCDF-4 file whose coordinate has its values in another file."""
    path = inside / "a.nc"
    with netCDF4.Dataset(path, "w") as file:
        file.createDimension("time", len(X))
        file.createVariable("x", "f8", ("time",))[:] = X
    with h5py.File(path, "a") as file:
        scale = file["time"]
        file.create_dataset("other", X.shape, "f8", external=[(str(_raw(outside)), 0, X.nbytes)])
        file["other"].dims[0].attach_scale(scale)
    return Case(path, str(outside / "raw.bin"), str(outside))


def openpmd(inside: Path, outside: Path) -> Case:
    """openPMD series with a record in another file."""
    with h5py.File(inside / "a.h5", "w") as file:
        texts = {"openPMD": "1.1.0", "basePath": "/data/%T/", "particlesPath": "particles/", "meshesPath": "fields/"}
        for key, text in {**texts, "iterationEncoding": "groupBased", "iterationFormat": "/data/%T/"}.items():
            file.attrs[key] = np.bytes_(text)
        group = file.create_group("data/0")
        group.attrs.update({"time": 0.0, "dt": 1.0, "timeUnitSI": 1.0})
        made = group.create_dataset("particles/e/x", X.shape, "f8", external=[(str(_raw(outside)), 0, X.nbytes)])
        made.attrs.update({"unitSI": 1.0})
        made.attrs["unitDimension"] = np.zeros(7)
        made.attrs["timeOffset"] = 0.0
    return Case(inside / "a.h5", str(outside / "raw.bin"), str(outside))


def _array_v2(**changes: Any) -> dict[str, Any]:
    array = {"zarr_format": 2, "shape": [len(X)], "chunks": [len(X)], "dtype": "<f8", "compressor": None}
    return {**array, "filters": None, "fill_value": 0, "order": "C", **changes}


def _chunk(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    X.tofile(folder / "0")


def zarr_v2(inside: Path, outside: Path, name: str = "../../outside/x") -> Case:
    """Consolidated metadata of version 2 with the name of an array elsewhere."""
    _chunk(outside / "x")
    metadata = {f"{name}/.zarray": _array_v2(), ".zgroup": {"zarr_format": 2}}
    store = inside / "a.zarr"
    store.mkdir()
    (store / ".zmetadata").write_text(json.dumps({"zarr_consolidated_format": 1, "metadata": metadata}))
    return Case(store, "outside/x", str(outside), {"inputs": name})


def zarr_v2_absolute(inside: Path, outside: Path) -> Case:
    """Consolidated metadata with an absolute name."""
    return zarr_v2(inside, outside, f"{outside}/x")._replace(expected=None)


def zarr_v3(inside: Path, outside: Path) -> Case:
    """Consolidated metadata of version 3, likewise."""
    (outside / "x" / "c").mkdir(parents=True)
    X.tofile(outside / "x" / "c" / "0")
    array = {"zarr_format": 3, "node_type": "array", "shape": [len(X)], "data_type": "float64", "fill_value": 0}
    array["chunk_grid"] = {"name": "regular", "configuration": {"chunk_shape": [len(X)]}}
    array |= {"chunk_key_encoding": {"name": "default"}, "codecs": [{"name": "bytes", "configuration": {}}]}
    consolidated = {"kind": "inline", "metadata": {"../../outside/x": array}}
    root = {"zarr_format": 3, "node_type": "group", "attributes": {}, "consolidated_metadata": consolidated}
    store = inside / "a.zarr"
    store.mkdir()
    (store / "zarr.json").write_text(json.dumps(root))
    return Case(store, "outside/x", str(outside), {"inputs": "../../outside/x"})


def zarr_symlink(inside: Path, outside: Path) -> Case:
    """Array of a store that is a symbolic link out of it."""
    _chunk(outside / "x")
    (outside / "x" / ".zarray").write_text(json.dumps(_array_v2()))
    store = inside / "a.zarr"
    store.mkdir()
    (store / ".zgroup").write_text(json.dumps({"zarr_format": 2}))
    (store / "x").symlink_to(outside / "x")
    return Case(store, "a.zarr/x", str(outside))


def _references(inside: Path, url: str) -> Path:
    refs = {".zgroup": '{"zarr_format":2}', "x/.zarray": json.dumps(_array_v2()), "x/0": [url, 0, X.nbytes]}
    (inside / "a.json").write_text(json.dumps({"version": 1, "refs": refs}))
    return inside / "a.json"


def _parquet_references(inside: Path, url: str) -> Path:
    folder = inside / "a.parq"
    (folder / "x").mkdir(parents=True)
    metadata = {".zgroup": {"zarr_format": 2}, "x/.zarray": _array_v2()}
    (folder / ".zmetadata").write_text(json.dumps({"metadata": metadata, "record_size": 10}))
    row = {"path": [url], "offset": [0], "size": [X.nbytes], "raw": pa.array([None], pa.binary())}
    pq.write_table(pa.table(row), folder / "x" / "refs.0.parq")
    return folder


def kerchunk_file(inside: Path, outside: Path) -> Case:
    """Reference of kerchunk to a file by its URL."""
    url = _raw(outside).as_uri()
    return Case(_references(inside, url), str(outside / "raw.bin"), str(outside))


def kerchunk_above(inside: Path, outside: Path) -> Case:
    """Reference of kerchunk by ``../``."""
    _raw(outside)
    return Case(_references(inside, "../outside/raw.bin"), "outside/raw.bin", str(outside))


def kerchunk_passwd(inside: Path, outside: Path) -> Case:
    """Reference of kerchunk to the whole of a file of the system: even its size is a fact."""
    path = _references(inside, "file:///etc/passwd")
    path.write_text(path.read_text().replace('"file:///etc/passwd", 0, 96', '"file:///etc/passwd"'))
    return Case(path, PASSWD, "/etc", {}, None)


def kerchunk_parquet(inside: Path, outside: Path) -> Case:
    """References of kerchunk in Parquet."""
    return Case(_parquet_references(inside, _raw(outside).as_uri()), str(outside / "raw.bin"), str(outside))


def repository(inside: Path, outside: Path) -> Case:
    """Icechunk repository with a virtual chunk."""
    url, prefix = _raw(outside).as_uri(), f"{outside.as_uri()}/"
    config = icechunk.RepositoryConfig.default()
    store = icechunk.local_filesystem_store(str(outside))
    config.set_virtual_chunk_container(icechunk.VirtualChunkContainer(prefix, store))
    made = icechunk.Repository.create(icechunk.local_filesystem_storage(str(inside / "repo")), config=config)
    made.save_config()
    session = made.writable_session("main")
    group = zarr.create_group(session.store)
    group.create_array("x", shape=X.shape, chunks=X.shape, dtype="f8", compressors=None, filters=None)
    session.store.set_virtual_ref("x/c/0", url, offset=0, length=X.nbytes)
    session.commit("one")
    return Case(inside / "repo", str(outside / "raw.bin"), str(outside))


LOCAL = (
    *(hdf5_raw, hdf5_passwd, hdf5_raw_above, hdf5_raw_behind_symlink, hdf5_virtual_raw, hdf5_virtual_of_external),
    *(hdf5_link, hdf5_link_of_link, nexus, netcdf_coordinate, openpmd, zarr_v2, zarr_v2_absolute, zarr_v3),
    *(zarr_symlink, kerchunk_file, kerchunk_above, kerchunk_passwd, kerchunk_parquet, repository),
)


def _outcome(comm: MPI.Intracomm, path: str, options: dict[str, Any], variable: str) -> Any:
    """Return the values of this rank of the field "x", or of the only one, or the text of the error."""
    before = os.environ.pop(VARIABLE, None)
    if comm.rank == 0 and variable:  # the one environment that counts
        os.environ[VARIABLE] = variable
    try:
        loaded = md.open_dataset(path, comm=comm, **options).load()
        return [loaded["x"]] if isinstance(loaded, dict) and "x" in loaded else [loaded]
    except DataError as error:
        return str(error)
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before


def _text(outcomes: list[Any]) -> str:
    """Return the error that all ranks have raised."""
    assert len({str(outcome) for outcome in outcomes}) == 1 and isinstance(outcomes[0], str), outcomes
    return str(outcomes[0])


def _folders(tmp_path: Path) -> tuple[Path, Path]:
    folders = tmp_path / "inside", tmp_path / "outside"
    for folder in folders:
        folder.mkdir()
    return folders


@pytest.mark.parametrize("make", LOCAL, ids=lambda make: make.__name__)
def test_a_file_leads_to_no_other_one_unless_that_is_trusted(
    make: Callable[[Path, Path], Case], tmp_path: Path, ranks: Pools
) -> None:
    case = make(*_folders(tmp_path))
    for size in (1, 3):
        run = partial(ranks(size).run, _outcome, str(case.path))
        text = _text(run(dict(case.options), ""))
        assert "not trusted" in text and case.target in text
        assert "trusted=[" in text and f"{VARIABLE}=" in text and case.trusted in text
        for outcomes in (run({**case.options, "trusted": [case.trusted]}, ""), run(dict(case.options), case.trusted)):
            if case.expected is None:
                assert all("not trusted" not in str(outcome) for outcome in outcomes)
            else:
                values = np.concatenate([np.ravel(next(iter(_arrays(outcome)))) for outcome in outcomes])
                np.testing.assert_array_equal(values, case.expected)


def _arrays(outcome: Any) -> list[Any]:
    assert not isinstance(outcome, str), outcome
    (loaded,) = outcome
    return list(loaded.values()) if isinstance(loaded, dict) else [loaded]


class Server(NamedTuple):
    """Server on loopback, and the paths that it was asked for."""

    url: str
    asked: list[str]


@contextmanager
def _serving(folder: Path) -> Iterator[Server]:
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            try:
                data = (folder / self.path.lstrip("/")).read_bytes()
            except OSError:
                self.send_error(404)
                return
            begin, end = 0, len(data)
            if asked_range := self.headers.get("Range"):
                first, _, last = asked_range.removeprefix("bytes=").partition("-")
                begin, end = int(first), min(int(last or end - 1) + 1, end)
            self.send_response(206 if asked_range else 200)
            self.send_header("Content-Length", str(end - begin))
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
            self.send_header("Last-Modified", "Tue, 01 Jan 2030 00:00:00 GMT")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data[begin:end])

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield Server(f"http://127.0.0.1:{server.server_address[1]}", asked)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _manifest(inside: Path, url: str) -> Path:
    (inside / "a.csv").write_text(f"image,label\n{url},1\n")
    return inside / "a.csv"


WEB: dict[str, tuple[Callable[[Path, str], Path], str, dict[str, Any]]] = {
    "kerchunk": (_references, "raw.bin", {}),
    "kerchunk in Parquet": (_parquet_references, "raw.bin", {}),
    "manifest": (_manifest, "a.png", {"format": "images"}),
    "manifest by its layout": (_manifest, "a.png", {"layout": "manifest"}),
}


@pytest.mark.parametrize("kind", WEB)
def test_no_host_is_asked_unless_it_is_trusted(kind: str, tmp_path: Path, ranks: Pools) -> None:
    inside, outside = _folders(tmp_path)
    _raw(outside)
    Image.fromarray(np.arange(48, dtype="u1").reshape(4, 4, 3)).save(outside / "a.png")
    make, name, options = WEB[kind]
    with _serving(outside) as server:
        path = str(make(inside, f"{server.url}/{name}"))
        for size in (1, 3):
            run = partial(ranks(size).run, _outcome, path)
            others = [server.url.rpartition(":")[0], "http://example.org", f"{server.url}/folder", f"{server.url[:-1]}"]
            for given in ({}, {"trusted": others}):
                text = _text(run({**options, **given}, ""))
                assert (
                    f"{server.url}/{name}" in text and "loopback host" in text and f"trusted=['{server.url}']" in text
                )
            assert not server.asked
            for outcomes in (run({**options, "trusted": server.url}, ""), run(options, f"/nowhere, {server.url}")):
                assert sum(len(_arrays(outcome)[0]) for outcome in outcomes) == (12 if name == "raw.bin" else 1)
            assert server.asked
            server.asked.clear()


@pytest.mark.parametrize(
    ("host", "kind"), [("169.254.169.254", "link-local"), ("10.0.0.1", "private"), ("localhost:80", "loopback")]
)
def test_hosts_of_the_machine_and_of_its_network_are_named_one_by_one(host: str, kind: str, tmp_path: Path) -> None:
    path = _references(tmp_path, f"http://{host}/latest/meta-data")
    for trusted in ([], ["/", "http://169.254.0.0", "http://10.0.0.2", "https://localhost"]):
        with pytest.raises(DataError, match=f"a {kind} host, which has to be named itself"):
            md.open_dataset(path, comm=MPI.COMM_SELF, trusted=trusted)


LAION = [f"http://127.0.0.1:9/{number}.jpg" for number in range(5)]


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_a_table_with_a_column_of_urls_is_a_table(suffix: str, tmp_path: Path, ranks: Pools) -> None:
    with _serving(tmp_path) as server:
        urls = [url.replace("http://127.0.0.1:9", server.url) for url in LAION]
        frame = pd.DataFrame({"URL": urls, "similarity": np.arange(5.0)})
        path = tmp_path / f"laion.{suffix}"
        if suffix == "parquet":
            frame.to_parquet(path)
        else:
            path.write_text(
                frame.to_csv(index=False) if suffix == "csv" else frame.to_json(orient="records", lines=True)
            )
        data = md.open_dataset(path, comm=MPI.COMM_SELF).load()
        assert [str(url, "utf-8") if isinstance(url, bytes) else url for url in data["URL"]] == urls
        outcomes = ranks(3).run(_outcome, str(path), {"inputs": "similarity"}, "")
        assert np.concatenate([np.ravel(_arrays(outcome)[0]) for outcome in outcomes]).tolist() == list(range(5))
        assert not server.asked


def test_local_images_of_a_table_are_read_wherever_they_lie(tmp_path: Path) -> None:
    inside, outside = _folders(tmp_path)
    Image.new("L", (4, 4)).save(outside / "1.png")
    (inside / "a.csv").write_text(f"path,label\n{outside / '1.png'},7\n../outside/1.png,8\n")
    assert md.open_dataset(inside / "a.csv", comm=MPI.COMM_SELF).load()["label"].tolist() == [7, 8]


OME = """<?xml version="1.0"?><OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06" UUID="urn:uuid:1">
<Image ID="Image:0"><Pixels ID="Pixels:0" DimensionOrder="XYTCZ" Type="uint8" SizeX="8" SizeY="8" SizeT="2" SizeC="1"
SizeZ="1"><TiffData IFD="0" FirstT="0" PlaneCount="1"><UUID FileName="a.ome.tif">urn:uuid:1</UUID></TiffData>
<TiffData IFD="0" FirstT="1" PlaneCount="1"><UUID FileName="{other}">urn:uuid:2</UUID></TiffData></Pixels></Image>
</OME>"""


@pytest.mark.parametrize("options", [{}, {"axes": "TYX"}, {"samples": "T"}], ids=str)
def test_a_picture_opens_no_other_one(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, outside = _folders(tmp_path)
    tifffile.imwrite(outside / "b.ome.tif", np.zeros((8, 8), "u1"), metadata=None)
    text = OME.format(other=outside / "b.ome.tif")
    path = inside / "a.ome.tif"
    tifffile.imwrite(path, np.ones((8, 8), "u1"), description=text, metadata=None)
    opened: list[str] = []
    original = tifffile.tifffile.FileHandle.open
    monkeypatch.setattr(
        tifffile.tifffile.FileHandle, "open", lambda self: opened.append(str(self._file)) or original(self)
    )
    with suppress(DataError):
        md.open_dataset(path, comm=MPI.COMM_SELF, **options).load()
    assert opened and not any("b.ome.tif" in name for name in opened)


def _eiger(folder: Path, data: Path, name: str) -> Path:
    """Write a master of a detector, by links and by a virtual dataset, and its two data files."""
    data.mkdir(exist_ok=True, parents=True)
    layout = h5py.VirtualLayout((4, 3), "u2")
    with h5py.File(folder / "run_master.h5", "w") as file:
        for number in (1, 2):
            with h5py.File(data / f"data_{number:06d}.h5", "w") as part:
                part["entry/data/data"] = np.full((2, 3), number, "u2")
            file[f"entry/data/data_{number:06d}"] = h5py.ExternalLink(f"{name}data_{number:06d}.h5", "entry/data/data")
            source = h5py.VirtualSource(f"{name}data_{number:06d}.h5", "entry/data/data", (2, 3))
            layout[2 * number - 2 : 2 * number] = source
        file.create_virtual_dataset("entry/data/all", layout)
    return folder / "run_master.h5"


@pytest.mark.parametrize("where", ["beside", "below", "above", "elsewhere", "behind links"])
def test_masters_of_beamlines_lead_to_their_data_files(where: str, tmp_path: Path, ranks: Pools) -> None:
    inside, outside = _folders(tmp_path)
    folder, name = {
        "beside": (inside, ""),
        "below": (inside / "raw", "raw/"),
        "above": (outside, "../outside/"),
        "elsewhere": (outside, f"{outside}/"),
        "behind links": (inside, ""),
    }[where]
    path = _eiger(inside, folder, name)
    if where == "behind links":
        (outside / "run_master.h5").symlink_to(path)
        path = outside / "run_master.h5"
    for size in (1, 3):
        outcomes = ranks(size).run(_outcome, str(path), {"inputs": "entry/data/all"}, "")
        assert np.concatenate([_arrays(outcome)[0] for outcome in outcomes])[:, 0].tolist() == [1, 1, 2, 2]
    data = md.open_dataset(path, inputs="entry/data/data_000002", comm=MPI.COMM_SELF).load()
    assert np.all(next(iter(data.values())) == 2)


def test_a_folder_that_the_user_names_is_trusted_with_its_tree(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    _raw(tmp_path / "runs" / "b")
    path = _external(tmp_path / "runs" / "a" / "1.h5", "../b/raw.bin")
    with pytest.raises(DataError, match="not trusted"):
        md.open_dataset(path, comm=MPI.COMM_SELF)
    (tmp_path / "runs" / "year=1").mkdir()
    path.rename(tmp_path / "runs" / "year=1" / "1.h5")
    assert md.open_dataset(tmp_path / "runs", comm=MPI.COMM_SELF).load()["x"].tolist() == X.tolist()


def test_raw_data_lie_beside_their_file_and_not_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, outside = _folders(tmp_path)
    _raw(inside)
    path = _external(inside / "a.h5", "raw.bin")
    (X + 100).tofile(outside / "raw.bin")
    monkeypatch.chdir(outside)
    data = md.open_dataset(path, comm=MPI.COMM_SELF)
    assert data.load()["x"].tolist() == X.tolist() and data[3]["x"] == 3
    (inside / "raw.bin").unlink()
    with pytest.raises(FormatError, match="raw data file") as caught:
        md.open_dataset(path, inputs="x", comm=MPI.COMM_SELF)
    assert "working directory" in str(caught.value)


@pytest.mark.parametrize("kind", ["link", "virtual", "reference"])
def test_the_working_directory_is_no_base(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, outside = _folders(tmp_path)
    with h5py.File(outside / "b.h5", "w") as file:
        file["x"] = X
    _raw(outside)
    monkeypatch.chdir(outside)
    if kind == "reference":
        path = _references(inside, "raw.bin")
    elif kind == "virtual":
        path = _virtual(inside / "a.h5", "b.h5")
    else:
        path = inside / "a.h5"
        with h5py.File(path, "w") as file:
            file["x"] = h5py.ExternalLink("b.h5", "x")
    with pytest.raises(DataError, match="working directory"):
        md.open_dataset(path, inputs="x", comm=MPI.COMM_SELF).load()


def test_references_beside_their_files_need_no_trust(tmp_path: Path) -> None:
    _raw(tmp_path)
    for path in (_references(tmp_path, "raw.bin"), _parquet_references(tmp_path, f"{tmp_path}/raw.bin")):
        assert md.open_dataset(path, comm=MPI.COMM_SELF).load()["x"].tolist() == X.tolist()


def test_a_pipe_is_never_opened(tmp_path: Path) -> None:
    """It would wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = h5py.ExternalLink("pipe", "x")
    for path in (_external(tmp_path / "b.h5", "pipe"), _virtual(tmp_path / "c.h5", "pipe"), tmp_path / "a.h5"):
        with pytest.raises(DataError, match="pipe or a device"):
            md.open_dataset(path, inputs="x", comm=MPI.COMM_SELF)


def test_whoever_asks_again_is_told_again(tmp_path: Path) -> None:
    inside, outside = _folders(tmp_path)
    linked = hdf5_link(inside, outside).path
    for path in (linked, _external(inside / "b.h5", str(outside / "raw.bin"))):
        with open_file(str(path)) as file:
            _refused_again(file)


def _refused_again(file: h5py.File) -> None:
    for _ in range(2):
        with pytest.raises(DataError, match="not trusted"):
            file["x"]


def test_separators_of_chunk_keys_are_no_folders(tmp_path: Path) -> None:
    store = tmp_path / "a.zarr"
    (store / "x").mkdir(parents=True)
    (store / ".zgroup").write_text('{"zarr_format": 2}')
    (store / "x" / ".zarray").write_text(
        json.dumps(_array_v2(shape=[4, 3], chunks=[4, 3], dimension_separator="/../../"))
    )
    with pytest.raises(FormatError, match="separator"):
        md.open_dataset(store, comm=MPI.COMM_SELF)


def test_trust_is_no_option_of_readers_and_trusted_one_of_all_formats(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", X)
    assert len(md.open_dataset(tmp_path / "a.npy", comm=MPI.COMM_SELF, trusted="/nowhere")) == 12
    _external(tmp_path / "a.h5", PASSWD)
    for options, problem in (({"trust": Trust(("/",))}, "no option 'trust'"), ({"trusted": [""]}, "cannot be trusted")):
        with pytest.raises(DataError, match=problem):
            md.open_dataset(tmp_path / "a.h5", comm=MPI.COMM_SELF, **options)


@pytest.mark.parametrize(
    ("tree", "target", "allowed"),
    [
        ("s3://bucket", "s3a://bucket/x", True),
        ("s3://bucket/a", "s3://bucket/ab", False),
        ("s3://bucket/a", "s3://bucket/a/../b", False),
        ("s3://bucket", "s3://bucket.evil.org/x", False),
        ("https://Host.org:443/a", "https://host.org/a/b", True),
        ("https://host.org/a", "https://host.org/a/%2e%2e/b", False),
        ("https://host.org", "http://host.org/a", False),
        ("https://host.org", "https://host.org@evil.org/a", False),
        ("https://host.org", "https://host.org\\@evil.org/a", False),
        ("http://127.0.0.1:8000", "http://127.0.0.1/a", False),
        ("/sdf/data", "/sdf/database/x", False),
        ("/sdf/data", "/sdf/data", True),
        ("file:///sdf/my%20data", "/sdf/my data/x", True),
        ("/", "s3://bucket/x", False),
    ],
)
def test_trees(tree: str, target: str, allowed: bool) -> None:
    assert Trust.of([tree]).allows(target) is allowed


def test_hdf5_files_lead_to_local_ones_of_their_kind(tmp_path: Path) -> None:
    inside, outside = _folders(tmp_path)
    with h5py.File(outside / "b.h5", "w") as file:
        file["x"] = X
    own = str(inside / "a.h5")
    trust = Trust().beside(own)
    trust.check_hdf5(own, own)
    trust.check_hdf5(str(outside / "b.h5"), own)
    for check, path in (
        (trust.check_hdf5, _raw(outside)),
        (trust.check, outside / "b.h5"),
        (trust.check_hdf5, "s3://b/x"),
    ):
        with pytest.raises(DataError, match="not trusted"):
            check(str(path), own)


def test_the_command_prints_what_its_references_need(tmp_path: Path) -> None:
    inside, outside = _folders(tmp_path)
    with netCDF4.Dataset(outside / "a.nc", "w") as file:
        file.createDimension("time", 40)
        file.createDimension("c", 100)
        file.createVariable("x", "f8", ("time", "c"))[:] = np.arange(4000.0).reshape(40, 100)
    command = [sys.executable, "-m", "matex_data", "index", str(outside / "a.nc"), "--to", str(inside / "a.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True, cwd=ROOT)
    assert f"trusted=['{outside}']" in done.stdout.replace("\n", ""), done.stdout
    with pytest.raises(DataError, match="not trusted"):
        md.open_dataset(inside / "a.json", comm=MPI.COMM_SELF)
    assert len(md.open_dataset(inside / "a.json", comm=MPI.COMM_SELF, trusted=outside, inputs="x")) == 40
    assert trees_of([str(outside / "a.nc")], str(outside / "refs.json")) == []


def test_ranges_in_braces_are_compared_with_what_exists(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.h5").touch()
    before = time.monotonic()
    for pattern, count in (
        (f"{tmp_path}/{{0..99999999999}}.h5", "100,000,000,000"),
        (f"{tmp_path}/{{0..9999}}.h5", "10,000"),
    ):
        with pytest.raises(DataError, match="no such file") as caught:
            expand(pattern)
        assert count in str(caught.value) and "3.h5" in str(caught.value)
    with pytest.raises(DataError, match="too many files of a web server"):
        expand("https://example.org/{0..99999999999}.h5")
    assert time.monotonic() - before < 10
    assert len(expand(f"{tmp_path}/{{0..2}}.h5")) == 3


CLAIMED = 10**12


@pytest.mark.parametrize("kind", ["folder", "json", "parquet"])
def test_what_references_and_arrays_claim_is_bounded_by_what_there_is(kind: str, tmp_path: Path) -> None:
    arrays = {name: _array_v2(shape=[CLAIMED], chunks=[1]) for name in ("x", "time")}
    arrays["wide"] = _array_v2(shape=[10, 10**8], chunks=[1, 1])
    documents = {".zgroup": {"zarr_format": 2}, **{f"{name}/.zarray": array for name, array in arrays.items()}}
    for name, array in arrays.items():
        documents[f"{name}/.zattrs"] = {"_ARRAY_DIMENSIONS": ["time"] if len(array["shape"]) == 1 else ["t", "y"]}
    path = tmp_path / {"json": "a.json", "parquet": "a.parq", "folder": "a.zarr"}[kind]
    if kind == "json":
        path.write_text(
            json.dumps({"version": 1, "refs": {key: json.dumps(value) for key, value in documents.items()}})
        )
    else:
        path.mkdir()
        records = {"record_size": 1} if kind == "parquet" else {}
        (path / ".zmetadata").write_text(json.dumps({"metadata": documents, **records}))
    before = time.monotonic()
    assert len(md.open_dataset(path, comm=MPI.COMM_SELF, inputs="x")) == CLAIMED
    for options, found in (
        ({"inputs": "wide", "sample_dim": "t"}, "100,000,000"),
        ({"inputs": "x", "sel": {"time": 3}}, "1,000,000,000,000"),
    ):
        with pytest.raises(FormatError, match="too many chunks") as caught:
            md.open_dataset(path, comm=MPI.COMM_SELF, **options)
        assert found in str(caught.value)
    assert time.monotonic() - before < 10


def test_a_parquet_file_of_references_that_claims_more_than_it_has(tmp_path: Path) -> None:
    path = _parquet_references(tmp_path, "raw.bin")
    rows = (1 << 24) + 1
    nothing = pa.nulls(rows, pa.string())
    numbers = pa.array(np.zeros(rows, "i8"))
    table = pa.table({"path": nothing, "offset": numbers, "size": numbers, "raw": pa.nulls(rows, pa.binary())})
    pq.write_table(table, path / "x" / "refs.0.parq")
    with pytest.raises(FormatError, match="references are damaged") as caught:
        md.open_dataset(path, comm=MPI.COMM_SELF)
    assert str(rows) in str(caught.value)
