"""Samples of variable length in HDF5: contents with offsets or counts, and known conventions, against h5py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from matex_data import DataError, FormatError, PartitionError, open_dataset
from matex_data.errors import DecodeError
from matex_data.io.counters import process_profile
from matex_data.readers.hdf5.reader import index
from tests.support.corpus import CORPUS, needs_corpus
from tests.support.format_suite import Case, FormatSuite, _bytes_read
from tests.support.ranks import Pool, Pools
from tests.support.serial import every_row

COUNTS = np.array([3, 0, 2, 5, 1, 0, 4])
JET = np.dtype([("pt", "<f4"), ("p4", [("x", ">f8"), ("y", "<f4")])])


def ragged(parts: list[Any]) -> np.ndarray[Any, Any]:
    """Return arrays of different lengths as an array of objects."""
    out = np.empty(len(parts), object)
    for i, part in enumerate(parts):
        out[i] = np.asarray(part)
    return out


def cut(values: Any, counts: Any) -> list[np.ndarray[Any, Any]]:
    return np.split(np.asarray(values), np.cumsum(counts)[:-1])


def write(path: Path, counts: Any = COUNTS, **options: Any) -> dict[str, Any]:
    """Write a group and a table of jets, with offsets and counts in every form; return the contents."""
    random, total = np.random.default_rng(0), int(np.sum(counts))
    table = np.zeros(total, JET)
    table["pt"], table["p4"]["x"] = random.normal(size=total), random.normal(size=total)
    pt, index_ = random.normal(size=total).astype(">f4"), np.arange(total)
    ends = np.cumsum(counts)
    with h5py.File(path, "w") as file:
        file.create_dataset("jets/pt", data=pt, **options)
        file.create_dataset("jets/index", data=index_, **options)
        file.create_dataset("table", data=table, **options)
        file["at/offsets"] = np.append(0, ends)
        file["at/starts"] = ends - counts
        file["at/ends"] = ends
        file["at/counts"] = np.asarray(counts, "u1")
        file["met"] = np.arange(len(counts), dtype="f8")
    return {"jets/pt": pt, "jets/index": index_, "table": table}


@pytest.mark.parametrize(
    ("kind", "told"), [("offsets", False), ("ends", False), ("counts", False), ("starts", True), ("counts", True)]
)
@pytest.mark.parametrize("options", [{}, {"chunks": (3,), "compression": 1, "shuffle": True}])
def test_every_kind_of_offsets(tmp_path: Path, kind: str, told: bool, options: dict[str, Any]) -> None:
    path = tmp_path / "a.h5"
    contents = write(path, **options)
    value = (f"at/{kind}", kind) if told else f"at/{kind}"
    names = ["jets/pt", "jets/index", "table/pt", "table/p4/x", "met"]
    found = index(str(path), names, offsets={"jets": value, "table": value})
    assert len(found) == len(COUNTS)
    for name in names[:-1]:
        expected = contents.get(name)
        if expected is None:
            expected = contents["table"]
            for word in name.split("/")[1:]:
                expected = expected[word]
        field = found.fields[name]
        assert field.ragged and field.shape == () and field.dtype == expected.dtype.newbyteorder("=")
        for sample, part in zip(every_row(found, name), cut(expected, COUNTS), strict=True):
            assert sample.dtype == field.dtype and np.array_equal(sample, part)
    assert not found.fields["met"].ragged


def test_whole_tables_and_single_contents(tmp_path: Path) -> None:
    contents = write(tmp_path / "a.h5")
    options = {"table": "at/counts", "jets/pt": ("at/starts", "at/counts")}
    data = open_dataset(tmp_path / "a.h5", inputs=["table", "jets/pt"], offsets=options, comm=MPI.COMM_SELF)
    loaded = data.load()
    for sample, part in zip(loaded["table"], cut(contents["table"], COUNTS), strict=True):
        assert np.array_equal(sample, part)
    with pytest.raises(FormatError, match="no such dtype") as caught:
        data.tf_dataset(2)
    assert '"table/pt"' in str(caught.value)


def test_a_content_that_the_file_lacks_is_told(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["jets/pt"], file["jets/n"], file["t"] = np.arange(5.0), [2, 3], np.zeros(2, [("a", "i4")])
    told = {"jet": "jets/n", "t/b": "jets/n", "jets": "jets/n", "t/a": "jets/n", "jets/pt": "jets/n"}
    with pytest.warns(UserWarning) as caught:
        index(str(tmp_path / "a.h5"), ["jets/pt"], offsets=told)
    messages = [str(warning.message) for warning in caught]
    assert ["offsets= names 'jet'" in messages[0], "offsets= names 't/b'" in messages[1], len(messages)] == [
        True,
        True,
        2,
    ]


def test_all_fields_of_a_file(tmp_path: Path) -> None:
    write(tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5", "a") as file:
        del file["at"], file["table"]
        file["jets/n"] = COUNTS
    data = open_dataset(tmp_path / "a.h5", offsets={"jets": "jets/n"}, comm=MPI.COMM_SELF)
    assert {name: field.ragged for name, field in data.schema.items()} == {
        "jets/index": True, "jets/pt": True, "met": False, "jets/n": False,
    }  # fmt: skip
    for offsets in ({"jets": "jets/n"}, {"/jets": "/jets/n"}):
        slashes = open_dataset(tmp_path / "a.h5", inputs="/jets/pt", offsets=offsets, comm=MPI.COMM_SELF)
        for one, other in zip(slashes.load()["/jets/pt"], data.load()["jets/pt"], strict=True):
            assert np.array_equal(one, other)


def test_the_chunks_are_read_once(tmp_path: Path) -> None:
    counts = np.random.default_rng(1).poisson(6, 3000)
    write(tmp_path / "a.h5", counts, chunks=(500,), compression=1)
    data = open_dataset(
        tmp_path / "a.h5", inputs=["table/pt", "table/p4/x"], offsets={"table": "at/counts"}, comm=MPI.COMM_SELF
    )
    with h5py.File(tmp_path / "a.h5") as file:
        stored = file["table"].id.get_storage_size()
    before = process_profile().bytes
    assert sum(len(batch["table/pt"]) for batch in data.batches(50, shuffle=True, seed=1)) == 3000
    assert process_profile().bytes - before <= 1.1 * stored


@pytest.mark.parametrize(
    ("offsets", "texts"),
    [
        ({"jets": "at/none"}, ["no dataset of the offsets", "'at/none'"]),
        ({"jets": "met"}, ["do not divide", "15 elements", "sum 21", '("met", "starts")']),
        ({"jets": ("at/counts", "offsets")}, ["do not divide", "n + 1 offsets"]),
        ({"jets": ("at/ends", "at/counts")}, ["do not follow one another", "row 2"]),
        ({"jets": ("at/offsets", "at/counts")}, ["differ in number"]),
        ({"jets": "bad/negative"}, ["are no offsets", "the least -1"]),
        ({"jets": "bad/half"}, ["are no offsets"]),
        ({"jets": "bad/matrix"}, ["are no offsets", "shape (2, 2)"]),
        ({"jets": "bad/both"}, ["several ways", "'offsets'", "'counts'", 'say which: offsets={"jets": ("bad/both", ']),
        ({"jets": 5}, ["no such value", "5"]),
        (["jets"], ["no such value"]),
        ({"wide": "at/counts"}, ["more than one number", "'wide/0'"]),
    ],
)
def test_offsets_that_do_not_fit(tmp_path: Path, offsets: Any, texts: list[str]) -> None:
    write(tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file["bad/negative"], file["bad/half"], file["bad/matrix"] = [-1, 16], [0.5, 14.5], np.zeros((2, 2))
        file["bad/both"] = [0, 0, 15]  # offsets of two samples, or the counts of three
        file["wide"] = np.zeros((15, 4))
    names = ["wide"] if "wide" in offsets else ["jets/pt"]
    with pytest.raises(FormatError) as caught:
        index(str(tmp_path / "a.h5"), names, offsets=offsets)
    assert caught.value.file == str(tmp_path / "a.h5")
    for text in texts:
        assert text in str(caught.value)
    assert len(index(str(tmp_path / "a.h5"), ["jets/pt"], offsets={"jets": ("bad/both", "counts")})) == 3


def test_the_number_of_samples_tells_the_kind(tmp_path: Path) -> None:
    """The first or the last sample is empty: only the fields beside show how many samples there are."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["at"], file["met"] = np.arange(5), [0, 2, 5], [1.0, 2.0]
        file["y"], file["counts"] = np.arange(5), [0, 5]
    found = index(str(tmp_path / "a.h5"), ["x", "met"], offsets={"x": "at"})
    assert [len(sample) for sample in every_row(found, "x")] == [2, 3]
    with pytest.raises(FormatError, match="several ways"):
        index(str(tmp_path / "a.h5"), ["y"], offsets={"y": "counts"})  # also offsets of one sample


def test_columns_of_a_jagged_matrix(tmp_path: Path) -> None:
    write(tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file["hits"] = np.arange(60.0).reshape(15, 4)
    found = index(str(tmp_path / "a.h5"), ["hits/0", "hits/3"], offsets={"hits": "at/offsets"})
    for sample, part in zip(every_row(found, "hits/3"), cut(np.arange(3.0, 60, 4), COUNTS), strict=True):
        assert np.array_equal(sample, part)


def test_a_broken_chunk_names_the_sample(tmp_path: Path) -> None:
    write(tmp_path / "a.h5", chunks=(3,), fletcher32=True)
    with h5py.File(tmp_path / "a.h5") as file:
        chunk = file["jets/pt"].id.get_chunk_info(2)
    content = bytearray((tmp_path / "a.h5").read_bytes())
    content[chunk.byte_offset] ^= 1
    (tmp_path / "a.h5").write_bytes(content)
    found = index(str(tmp_path / "a.h5"), ["jets/pt"], offsets={"jets": "at/counts"})
    with pytest.raises(DecodeError) as caught:
        every_row(found, "jets/pt")
    assert (caught.value.row, caught.value.byte) == (3, chunk.byte_offset)  # elements 6 to 8 are of sample 3


def _lheh5_2(file: h5py.File) -> dict[str, Any]:
    random = np.random.default_rng(2)
    events = np.column_stack([np.arange(7), COUNTS, np.cumsum(COUNTS) - COUNTS, random.normal(size=7)])
    particles = random.normal(size=(15, 3))
    file.create_dataset("events", data=events).attrs["properties"] = ["pid", "nparticles", "start", "scale"]
    file.create_dataset("particles", data=particles).attrs["properties"] = ["id", "px", "py"]
    file["version"], file["init"] = [2, 0, 0], np.arange(10.0)
    return {"events/scale": events[:, 3], "particles/px": cut(particles[:, 1], COUNTS)}


def _lheh5_1(file: h5py.File) -> dict[str, Any]:
    px, scale = np.arange(15.0), np.arange(7.0)
    file["event/start"], file["event/nparticles"], file["event/scale"] = np.cumsum(COUNTS) - COUNTS, COUNTS, scale
    file["particle/px"], file["particle/id"] = px, np.arange(15)
    file["procInfo/xSection"], file["init/beamA"] = [1.0], 2212
    return {"event/scale": scale, "particle/px": cut(px, COUNTS)}


def _nexus(file: h5py.File) -> dict[str, Any]:
    group = file.create_group("entry/bank1_events")
    group.attrs["NX_class"] = "NXevent_data"
    group["event_id"], group["event_time_offset"] = np.arange(15), np.arange(15.0)
    group["event_index"], group["event_time_zero"] = np.cumsum(COUNTS) - COUNTS, np.arange(7.0)
    names = ["event_id", "event_time_offset"]
    expected = {f"entry/bank1_events/{name}": cut(group[name][...], COUNTS) for name in names}
    return {**expected, "entry/bank1_events/event_time_zero": np.arange(7.0)}


def _lh5(file: h5py.File) -> dict[str, Any]:
    group = file.create_group("stp/det/time")
    group.attrs["datatype"] = "array<1>{array<1>{real}}"
    group["flattened_data"], group["cumulative_length"] = np.arange(15.0), np.cumsum(COUNTS)
    file["stp/det/evtid"] = np.arange(7)
    return {"stp/det/time": cut(np.arange(15.0), COUNTS), "stp/det/evtid": np.arange(7)}


def _hepfile(file: h5py.File) -> dict[str, Any]:
    file["jet/e"], file["jet/njet"], file["_SINGLETONS_GROUP_/COUNTER"] = np.arange(15.0), COUNTS, np.ones(7, int)
    file["METpx"] = np.arange(7.0)
    pairs = [["jet", "jet/njet"], ["jet/e", "jet/njet"], ["METpx", "_SINGLETONS_GROUP_/COUNTER"]]
    file["_MAP_DATASETS_TO_COUNTERS_"] = np.array(pairs, "S64")
    return {"jet/e": cut(np.arange(15.0), COUNTS), "METpx": np.arange(7.0), "jet/njet": COUNTS}


def _larcv(file: h5py.File) -> dict[str, Any]:
    extents = np.zeros(7, [("first", "<u4"), ("n", "<u4")])
    extents["first"], extents["n"] = np.cumsum(COUNTS) - COUNTS, COUNTS
    particles = np.zeros(15, JET)
    particles["pt"] = np.arange(15)
    file["Data/particle_group/extents"], file["Data/particle_group/particles"] = extents, particles
    return {"Data/particle_group/particles/pt": cut(np.arange(15, dtype="f4"), COUNTS)}


@pytest.mark.parametrize("content", [_lheh5_2, _lheh5_1, _nexus, _lh5, _hepfile, _larcv])
def test_known_conventions(tmp_path: Path, content: Callable[[h5py.File], dict[str, Any]]) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        contents = content(file)
    named = open_dataset(tmp_path / "a.h5", inputs=list(contents), comm=MPI.COMM_SELF)
    everything = open_dataset(tmp_path / "a.h5", comm=MPI.COMM_SELF)
    for data in (named, everything):
        loaded = data.load()
        for name, expected in contents.items():
            if name not in loaded and content is _larcv:  # the whole table
                loaded[name] = [sample["pt"] for sample in loaded["Data/particle_group/particles"]]
            for sample, part in zip(loaded[name], expected, strict=True):
                assert np.array_equal(sample, part)
    plain = [name for name in contents if name != "stp/det/time"][:1]
    assert not index(str(tmp_path / "a.h5"), plain, offsets={}).fields[plain[0]].ragged


def test_statistics_of_ragged_fields(tmp_path: Path, pool: Pool) -> None:
    counts = np.random.default_rng(1).poisson(6, 1000)
    contents = write(tmp_path / "a.h5", counts, chunks=(100,))
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file.create_dataset(
            "vlen", data=ragged(cut(contents["jets/pt"].astype("f4"), counts)), dtype=h5py.vlen_dtype("f4")
        )
    expected = contents["jets/pt"].astype("f8")
    for by_name in pool.run(_statistics, str(tmp_path / "a.h5")):
        for found in by_name.values():
            assert found["count"] == len(expected) and found["missing"] == 0
            assert found["mean"] == pytest.approx(expected.mean()) and found["std"] == pytest.approx(expected.std())
            assert (found["min"], found["max"]) == (expected.min(), expected.max())


def _statistics(comm: MPI.Intracomm, path: str) -> dict[str, dict[str, float]]:
    data = open_dataset(path, inputs=["jets/pt", "vlen"], offsets={"jets": "at/counts"}, comm=comm)
    found = data.statistics()
    keys = ("count", "missing", "mean", "std", "min", "max")
    return {name: {key: float(getattr(found[name], key)) for key in keys} for name in ("jets/pt", "vlen")}


def test_statistics_of_elements_have_no_axis(tmp_path: Path) -> None:
    write(tmp_path / "a.h5")
    data = open_dataset(tmp_path / "a.h5", inputs="jets/pt", offsets={"jets": "at/counts"}, comm=MPI.COMM_SELF)
    assert data.statistics("jets/pt", axis=-1).count == 15
    with pytest.raises(FormatError, match="no axis"):
        data.statistics("jets/pt", axis=1)


def _events(folder: Path) -> list[Path]:
    paths, random, first = [], np.random.default_rng(5), 0
    for number, rows in enumerate((150, 37, 1, 0, 110)):
        paths.append(folder / f"part{number}.h5")
        counts = random.poisson(4, rows)
        total = int(counts.sum())
        with h5py.File(paths[-1], "w") as file:
            file["jets/n"] = counts
            file.create_dataset("jets/pt", data=random.normal(size=total).astype(">f4"))
            options = {"chunks": (min(16, total),), "compression": 1, "fletcher32": True} if total else {}
            file.create_dataset("jets/e", data=random.normal(size=total), **options)
            file["id"] = np.arange(first, first + rows)
        first += rows
    return paths


OPTIONS = {"offsets": {"jets": ("jets/n", "counts")}}


class TestJagged(FormatSuite):
    def write(self, folder: Path) -> Case:
        read: dict[str, list[Any]] = {"jets/pt": [], "jets/e": []}
        flat: dict[str, list[Any]] = {"jets/n": [], "id": []}
        for path in _events(folder):
            with h5py.File(path) as file:
                counts = file["jets/n"][...]
                for name, parts in read.items():
                    native = file[name][...].astype(file[name].dtype.newbyteorder("="))
                    parts += cut(native, counts)[: len(counts)]
                for name, arrays in flat.items():
                    arrays.append(file[name][...])
        expected = {name: ragged(parts) for name, parts in read.items()}
        expected |= {name: np.concatenate(arrays) for name, arrays in flat.items()}
        return Case(str(folder / "*.h5"), expected, "id", OPTIONS)

    @pytest.mark.parametrize("size", [1, 3])
    def test_each_rank_reads_its_own_rows_alone(self, case: Case, ranks: Pools, size: int) -> None:
        """A sample may reach over the end of a chunk: each block may need one chunk of the next one."""
        for read, needed, blocks in ranks(size).run(_bytes_read, case):
            assert read <= 2 * needed + blocks

    def damage(self, folder: Path) -> Case:
        path = _events(folder)[0]
        with h5py.File(path) as file:
            chunk = file["jets/e"].id.get_chunk_info(3)
        content = bytearray(path.read_bytes())
        content[chunk.byte_offset + chunk.size // 2] ^= 0x10
        path.write_bytes(content)
        return Case(str(folder / "*.h5"), {}, "id", OPTIONS)


FILES = sorted((CORPUS / "particle" / "lheh5").glob("*"))


def _lhe_events(comm: MPI.Intracomm, path: Path) -> dict[str, Any]:
    return open_dataset(path, comm=comm).load()


@needs_corpus
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_lheh5_files_of_the_corpus(path: Path, pool: Pool) -> None:
    by_rank = pool.run(_lhe_events, path)
    with h5py.File(path) as file:
        tables = {name: (file[name][...], list(file[name].attrs["properties"])) for name in ("events", "particles")}
    events, columns = tables["events"]
    begin, count = (events[:, columns.index(name)].astype(int) for name in ("start", "nparticles"))
    for table, (values, names) in tables.items():
        for column, name in enumerate(names):
            found = np.concatenate([block[f"{table}/{name}"] for block in by_rank])
            if table == "events":
                assert np.array_equal(found, values[:, column])
                continue
            for i, sample in enumerate(found):
                assert np.array_equal(sample, values[begin[i] : begin[i] + count[i], column])


def test_a_damaged_offset_is_the_same_error_on_all_ranks(tmp_path: Path, pool: Pool) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        _lheh5_2(file)
        file["events"][4, 2] += 1
    outcomes = pool.outcomes(_lhe_events, tmp_path / "a.h5", timeout=30)
    assert all(isinstance(error, DataError) for error in outcomes)
    assert len({str(error) for error in outcomes}) == 1
    assert "row 4" in str(outcomes[0]) and "a.h5" in str(outcomes[0])


def test_offsets_that_do_not_fit_into_the_memory_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(9.0)
        file.create_dataset("offsets", (10**13,), "i8", chunks=(1 << 20,))  # of no stored chunk
    with pytest.raises(PartitionError, match=r"does not fit into the memory[\s\S]*'offsets'"):
        open_dataset(path, inputs="x", offsets={"x": "offsets"}, comm=MPI.COMM_SELF)
