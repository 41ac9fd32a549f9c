"""ROOT files: conformance suite, choice of trees and branches, blocks, types, and error messages."""

from __future__ import annotations

import pickle
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import awkward as ak
import numpy as np
import pytest
import uproot
from mpi4py import MPI
from uproot import serialization
from uproot.interpretation import Interpretation, identify
from uproot.interpretation.jagged import AsJagged
from uproot.interpretation.numerical import AsDouble32, AsDtype
from uproot.writing import _cascadetree as cascade

from matex_data import DataError, FieldNotFound, merge, open_dataset
from matex_data.errors import DecodeError, FormatError, OutOfMemory, PartitionError
from matex_data.index.cache import ChunkCache
from matex_data.index.model import RowSelection
from matex_data.readers import detect
from matex_data.readers.root import branches
from matex_data.readers.root.baskets import Baskets, unpack
from matex_data.readers.root.branches import TreeBranches
from matex_data.readers.root.entries import Clusters
from matex_data.readers.root.files import file_error
from matex_data.readers.root.reader import index
from tests.support.corpus import CORPUS, needs_corpus
from tests.support.format_suite import Case, FormatSuite
from tests.support.serial import every_row, random_rows

ROWS = (150, 37, 1, 110)
BASKET = 16  # entries
JETS = "AntiKt10UFOCSSKJetsAux./AntiKt10UFOCSSKJetsAux.constituentLinks"  # objects of a class


def events(rows: int, first: int = 0) -> dict[str, Any]:
    """Return branches of events with 0 to 4 muons each."""
    rng = np.random.default_rng(first)
    count = rng.integers(0, 5, rows)
    muons = {
        "pt": ak.unflatten(rng.exponential(20, count.sum()).astype("f4"), count),
        "charge": ak.unflatten(rng.integers(0, 2, count.sum(), dtype="i4") * 2 - 1, count),
    }
    return {
        "event": np.arange(first, first + rows),
        "MET_pt": rng.exponential(30, rows),
        "trigger": rng.integers(0, 2, rows).astype(bool),
        "position": rng.normal(size=(rows, 3)).astype("f4"),
        "Muon": ak.zip(muons),
    }


def write(path: Path, branches: dict[str, Any], tree: str = "events", basket: int = BASKET, **options: Any) -> str:
    """Write a tree with baskets of ``basket`` entries."""
    rows = len(next(iter(branches.values())))
    with uproot.recreate(path, **options) as file:
        types = {name: _type(array) for name, array in branches.items()}
        file.mktree(tree, types)
        for begin in range(0, rows, basket):
            file[tree].extend({name: array[begin : begin + basket] for name, array in branches.items()})
    return str(path)


def _type(array: Any) -> Any:
    return array.type.content if isinstance(array, ak.Array) else np.dtype((array.dtype, array.shape[1:]))


def _files(folder: Path) -> list[str]:
    first = np.cumsum((0, *ROWS[:-1]))
    return [write(folder / f"run{i}.root", events(rows, first[i])) for i, rows in enumerate(ROWS)]


def _objects(array: ak.Array) -> np.ndarray[Any, Any]:
    return np.fromiter((np.asarray(row) for row in array), object, len(array))


class TestRoot(FormatSuite):
    def write(self, folder: Path) -> Case:
        paths = _files(folder)
        arrays = ak.concatenate([uproot.open(path)["events"].arrays(library="ak") for path in paths])
        expected = {name: np.asarray(arrays[name]) for name in ("event", "MET_pt", "trigger", "position", "nMuon")}
        expected |= {name: _objects(arrays[name]) for name in ("Muon_pt", "Muon_charge")}
        return Case(str(folder / "*.root"), expected, "event")

    def damage(self, folder: Path) -> Case:
        damage_basket(_files(folder)[0], "Muon_pt", 3)
        return Case(str(folder / "*.root"), {}, "event")


def damage_basket(path: str, branch: str, basket: int) -> None:
    """Flip bytes of the compressed data of a basket."""
    with uproot.open(path) as file:
        seek = int(file["events"][branch].member("fBasketSeek")[basket])
        nbytes = int(file["events"][branch].member("fBasketBytes")[basket])
    content = bytearray(Path(path).read_bytes())
    for i in range(seek + nbytes - 24, seek + nbytes - 4):
        content[i] ^= 0x5A
    Path(path).write_bytes(content)


def opened(path: str, **options: Any) -> Any:
    return open_dataset(path, comm=MPI.COMM_SELF, **options)


def _interpreted_as(monkeypatch: pytest.MonkeyPatch, name: str, found: Exception | Interpretation) -> list[str]:
    """Let uproot interpret a branch as another type, or raise an error, and return the list of those it is asked for.

    It raises errors for types that it does not foresee, such as links of ATLAS; it writes none of these itself.
    """
    asked: list[str] = []
    original = identify.interpretation_of

    def interpretation_of(branch: Any, *others: Any, **options: Any) -> Any:
        asked.append(branch.name)
        if branch.name == name and isinstance(found, Exception):
            raise found
        return found if branch.name == name else original(branch, *others, **options)

    monkeypatch.setattr(identify, "interpretation_of", interpretation_of)
    return asked


ERRORS = [ValueError("invalid C++ type name syntax"), NotImplementedError("jetLink"), KeyError("fTypeName")]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_branches_whose_interpretation_fails_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    written = {name: array for name, array in events(50).items() if name != "Muon"}
    path = write(tmp_path / "a.root", written)
    _interpreted_as(monkeypatch, "trigger", error)
    with pytest.warns(UserWarning, match=rf"1 branch cannot.*left out[\s\S]*'trigger'.*{type(error).__name__}"):
        found = index(path)
    assert set(found.fields) == {"event", "MET_pt", "position"}
    np.testing.assert_array_equal(every_row(found, "event"), written["event"])
    with pytest.raises(FormatError, match=rf"cannot be read[\s\S]*'trigger'[\s\S]*{type(error).__name__}"):
        index(path, ["trigger"])
    with pytest.warns(UserWarning, match="1 branch"):
        assert list(index(path, ["[et]*"]).fields) == ["event"]


WITH_ARRAY = np.dtype([("x", ">f4"), ("y", ">f4", (2,))])


def test_arrays_in_structures_are_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaf lists such as ``x/F:y[2]/F``."""
    written = {name: array for name, array in events(50).items() if name != "Muon"}
    path = write(tmp_path / "a.root", written)
    _interpreted_as(monkeypatch, "position", AsDtype(WITH_ARRAY))
    found, whole = index(path), every_row(index(path, ["position"]), "position")
    for name, expected in (("x", written["position"][:, 0]), ("y", written["position"][:, 1:])):
        np.testing.assert_array_equal(every_row(found, f"position.{name}"), expected)
        np.testing.assert_array_equal(whole[name], expected)


def test_lists_of_vectors_are_lists_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as ``StdHepP4[StdHepN][4]`` of GENIE; uproot writes lists of numbers alone in a tree."""
    count = np.random.default_rng(2).integers(0, 4, 50)
    rows = np.arange(3 * count.sum(), dtype="f4").reshape(-1, 3)
    expected = np.split(rows, np.cumsum(count)[:-1])
    vectors = ak.unflatten(ak.from_numpy(rows, regulararray=True), count)
    with uproot.recreate(tmp_path / "tuple.root") as file:
        file.mkrntuple("events", {"x": vectors})
    write(tmp_path / "tree.root", {"x": ak.unflatten(ak.from_numpy(rows.reshape(-1)), 3 * count)})
    _interpreted_as(monkeypatch, "x", AsJagged(AsDtype(np.dtype((">f4", (3,))))))
    for name in ("tuple", "tree"):
        data = opened(str(tmp_path / f"{name}.root"), inputs="x")
        assert (data.schema["x"].inner, data.schema["x"].dtype) == ((None, 3), np.dtype("f4"))
        for found, vector in zip(data.load()["x"], expected, strict=True):
            np.testing.assert_array_equal(found, vector)
        batch = next(iter(data.tf_dataset(50)))
        np.testing.assert_array_equal(batch.values, rows)


def test_lists_of_records_within_records(tmp_path: Path) -> None:
    """Such as the four-vectors of ROOT's library, ``x.fCoordinates.fPt``, where the list is a field itself."""
    vectors = ak.Array([[{"p": {"a": 1.0, "b": 2}}], [], [{"p": {"a": 3.0, "b": 4}}, {"p": {"a": 5.0, "b": 6}}]])
    with uproot.recreate(tmp_path / "a.root") as file:
        file.mkrntuple("events", {"x": vectors})
    found = opened(str(tmp_path / "a.root"), inputs="x").load()["x"]
    assert [[{"p": {"a": a, "b": b}} for ((a, b),) in row.tolist()] for row in found] == vectors.to_list()


def test_lists_without_offsets_are_cut_by_the_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of CMS; uproot, which writes none, counts by the basket of the same number, whose entries may be others."""
    written = {"Muon": events(50)["Muon"]}
    path = write(tmp_path / "a.root", written)
    monkeypatch.setattr(TreeBranches, "_lacks_offsets", lambda self, branch: branch.count_branch is not None)
    found = index(path, ["Muon_pt", "Muon_charge"])
    for name, layout in found.files[0].layouts.items():
        assert layout.table.counted
        lists = zip(every_row(found, name), written["Muon"][name.removeprefix("Muon_")], strict=True)
        assert all(np.array_equal(one, other) for one, other in lists)


def test_lists_that_uproot_misreads_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """uproot counts the numbers of arrays in lists as elements, and reads memory behind the last one."""
    path = write(tmp_path / "a.root", {name: events(50)[name] for name in ("event", "trigger")})
    _interpreted_as(monkeypatch, "trigger", AsJagged(AsDouble32(-30, 30, 16, to_dims=(3,))))
    with pytest.warns(UserWarning, match=r"1 branch cannot.*left out[\s\S]*'trigger'.*Double32_t"):
        assert list(index(path).fields) == ["event"]


def test_lists_with_more_than_their_elements_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as structures that are stored member by member in ``PHYSLITE``, and ``fBits`` in files of Delphes."""
    path = write(tmp_path / "a.root", {name: events(50)[name] for name in ("event", "Muon")})
    _interpreted_as(monkeypatch, "Muon_pt", AsJagged(AsDtype(np.dtype(">u8"))))
    monkeypatch.setattr(TreeBranches, "_may_be_misread", lambda self, name: name.startswith("Muon_"))
    with pytest.warns(UserWarning, match=r"1 branch cannot.*left out[\s\S]*'Muon_pt'.*more than the elements"):
        assert list(index(path).fields) == ["event", "nMuon", "Muon_charge"]


def test_arrays_of_structures_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """uproot has no name for their type."""
    path = write(tmp_path / "a.root", {name: events(50)[name] for name in ("event", "position")})
    _interpreted_as(monkeypatch, "position", AsDtype(np.dtype((WITH_ARRAY, (15, 2)))))
    with pytest.warns(UserWarning, match=r"1 branch cannot.*left out[\s\S]*'position'"):
        assert list(index(path).fields) == ["event"]


def test_named_branches_are_opened_without_a_look_at_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = events(50)
    path = write(tmp_path / "a.root", written)
    asked = _interpreted_as(monkeypatch, "trigger", ValueError("a type"))
    found = index(path, ["event", "position"])
    np.testing.assert_array_equal(every_row(found, "position"), written["position"])
    assert set(asked) == {"event", "position"}


@needs_corpus
def test_only_named_branches_of_objects_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    path, tried = _corpus("uproot-issue-798.root"), list[list[str]]()

    def unreadable(path: str, key: str, names: list[str]) -> dict[str, str]:
        tried.append(list(names))
        return dict.fromkeys(names, "not tried")

    monkeypatch.setattr(branches, "unreadable", unreadable)
    with pytest.raises(FormatError, match=r"cannot be read[\s\S]*not tried"):
        index(path, [JETS], tree="CollectionTree")
    with pytest.warns(UserWarning, match="left out"):
        index(path, tree="CollectionTree")
    assert tried[0] == [JETS] and len(tried[1]) > 5


@pytest.mark.parametrize("compression", ["ZLIB", "LZMA", "LZ4", "ZSTD", None])
def test_compressions(tmp_path: Path, compression: str | None) -> None:
    codec = compression and getattr(uproot, compression)(4)
    path = write(tmp_path / "events.root", events(500), basket=200, compression=codec)
    found = index(path)
    with uproot.open(path) as file:
        for name in ("event", "position"):
            assert np.array_equal(every_row(found, name), file["events"][name].array(library="np"))
        muons = file["events"]["Muon_pt"].array(library="np")
    assert all(np.array_equal(a, b) for a, b in zip(every_row(found, "Muon_pt"), muons, strict=True))
    rows, numbers = random_rows(found, "Muon_pt", np.random.default_rng(1))
    assert all(np.array_equal(a, b) for a, b in zip(rows, muons[numbers], strict=True))


def test_patterns_of_names(tmp_path: Path) -> None:
    path = write(tmp_path / "events.root", events(50))
    x, y = next(iter(opened(path, inputs="Muon_*", targets=["MET_pt", "trig*"]).batches(10)))
    assert list(x) == ["Muon_pt", "Muon_charge"]
    assert list(y) == ["MET_pt", "trigger"]
    assert list(opened(path, inputs=["*_pt", "Muon_*"]).schema) == ["MET_pt", "Muon_pt", "Muon_charge"]
    with pytest.raises(FieldNotFound, match=r"(?s)no field matches.*'Muom_\*'.*'Muon_pt'"):
        opened(path, inputs="Muom_*")
    with pytest.raises(FieldNotFound, match=r"(?s)no such branch.*'Muon_ptt'.*'Muon_pt'"):
        opened(path, inputs="Muon_ptt")


def test_a_plain_name_wins_over_a_pattern(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **{"x[1]": np.arange(3), "x1": np.arange(3) + 10})
    data = opened(str(tmp_path / "a.npz"), inputs="x[1]")
    assert data.load()["x[1]"].tolist() == [0, 1, 2]
    assert list(opened(str(tmp_path / "a.npz"), inputs="x[12]").schema) == ["x1"]


def with_friends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let uproot write trees with a friend, in place of none: the bytes that ROOT writes for a list of one of them."""
    build = cascade.Tree._build_out
    version = serialization.numbytes_version

    def of_class(name: bytes, content: bytes) -> bytes:
        tagged = b"\xff\xff\xff\xff" + name + b"\0" + content
        return struct.pack(">I", len(tagged) | 0x40000000) + tagged

    named = b"\x00\x01" + bytes(4) + b"\x03\0\0\0" + b"\x06scores" + b"\x08b.root:s"
    friend = version(len(named) + 14, 2) + version(len(named), 1) + named + b"\x06scores" + b"\0"
    content = b"\x00\x01" + bytes(4) + b"\x03\0\0\0" + b"\0" + struct.pack(">i", 1)
    content += of_class(b"TFriendElement", friend) + b"\0"
    friends = of_class(b"TList", version(len(content), 5) + content)

    def build_out(tree: Any) -> list[bytes]:
        out: list[bytes] = build(tree)
        header = next(i for i in range(len(out)) if out[i] == version(sum(map(len, out[i + 1 :])), 20))
        assert out[-1] == bytes(28)
        out[-1] = bytes(16) + friends + bytes(8)
        out[header] = version(sum(map(len, out[header + 1 :])), 20)
        return out

    monkeypatch.setattr(cascade.Tree, "_build_out", build_out)


def test_friends_of_a_tree_are_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree with friends says so, unless all fields that are named are its own; ``merge`` reads both."""
    events, order = np.arange(20), np.random.default_rng(0).permutation(20)
    friend = write(tmp_path / "b.root", {"event": events[order], "score": order / 20}, "scores")
    with monkeypatch.context() as patch:
        with_friends(patch)
        path = write(tmp_path / "a.root", {"event": events, "pt": events * 0.5})
    with uproot.open(path, minimal_ttree_metadata=False) as file:
        assert len(file["events"].member("fFriends")) == 1
    for names in (None, ["p*"]):
        with pytest.warns(UserWarning, match=r"a\.root: the friends of 'events' are not read; .*merge"):
            opened(path, inputs=names)
    with pytest.warns(UserWarning, match="friends"), pytest.raises(FieldNotFound, match="score"):
        opened(path, inputs="score")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        both = merge(opened(path, inputs="pt"), opened(friend, targets="score"), on="event", how="inner")
        by_rows = merge(opened(path, inputs="pt"), opened(friend, targets="score"), how="rows")
    x, y = next(iter(both.batches(20)))
    np.testing.assert_array_equal(x, events * 0.5)
    np.testing.assert_array_equal(y, events / 20)
    np.testing.assert_array_equal(by_rows.load()["score"], order / 20)


def test_choice_of_the_tree(tmp_path: Path) -> None:
    path = tmp_path / "trees.root"
    with uproot.recreate(path) as file:
        file.mktree("a", {"x": "i4"}).extend({"x": np.arange(3, dtype="i4")})
        file.mktree("sub/b", {"x": "i4"}).extend({"x": np.arange(5, dtype="i4")})
        file.mktree("a", {"x": "i4"}).extend({"x": np.arange(4, dtype="i4")})
    with pytest.raises(FormatError, match=r"(?s)several trees.*'a', 'sub/b'.*tree="):
        opened(str(path))
    assert len(opened(str(path), tree="a")) == 4  # the highest cycle
    assert len(opened(str(path), tree="a;1")) == 3
    assert len(opened(str(path), tree="/sub/b")) == 5
    with pytest.raises(FormatError, match=r"(?s)no such tree.*'sub/b'.*tree='sub/c'"):
        opened(str(path), tree="sub/c")


def test_files_without_a_tree(tmp_path: Path) -> None:
    path = tmp_path / "histograms.root"
    with uproot.recreate(path) as file:
        file["mass"] = np.histogram(np.arange(10))
    with pytest.raises(FormatError, match=r"(?s)no tree.*'mass;1' \(TH1D\)"):
        opened(str(path))
    with uproot.recreate(path):
        pass
    with pytest.raises(FormatError, match="no keys"):
        opened(str(path))


def test_detection_by_content_and_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "events.dat", events(5))
    assert detect(path, Path(path).read_bytes()[:100]) == "root"
    assert len(opened(path)) == 5
    (tmp_path / "text.root").write_text("no ROOT file\n")
    with pytest.raises(FormatError, match=r"(?s)cannot be read as ROOT.*text\.root"):
        opened(str(tmp_path / "text.root"))


def test_a_compression_that_uproot_lacks_is_no_damage(tmp_path: Path) -> None:
    path = write(tmp_path / "old.root", events(2))
    error = ValueError("unsupported compression algorithm: b'CS'")  # of ROOT before version 2
    assert "hadd" in str(file_error(path, error).remedy) and "damaged" not in str(file_error(path, error))


def test_trees_without_entries(tmp_path: Path) -> None:
    write(tmp_path / "1.root", events(0))
    write(tmp_path / "2.root", events(20))
    write(tmp_path / "3.root", events(0))
    assert len(opened(str(tmp_path / "1.root"))) == 0
    assert list(opened(str(tmp_path / "1.root")).batches(4, remainder="keep")) == []
    with pytest.raises(PartitionError, match="fewer samples than a batch"):
        opened(str(tmp_path / "1.root")).batches(4)
    data = opened(str(tmp_path / "*.root"))
    assert len(data) == 20
    assert len(data.load()["Muon_pt"]) == 20


def test_files_that_lack_a_branch(tmp_path: Path) -> None:
    for i in range(5):
        branches = events(20)
        if i == 3:
            del branches["MET_pt"]
        write(tmp_path / f"{i}.root", branches)
    for options in ({}, {"inputs": ["MET_pt"]}):
        with pytest.warns(UserWarning, match=r"'MET_pt' in 1 of 5 files, such as .*3\.root"):
            found = opened(str(tmp_path / "*.root"), **options).load()["MET_pt"]
        assert np.flatnonzero(np.isnan(found)).tolist() == list(range(60, 80))
    assert len(opened(str(tmp_path / "*.root"), inputs="Muon_*")) == 100


def test_blocks_are_the_clusters_that_the_branches_share(tmp_path: Path) -> None:
    path = tmp_path / "clusters.root"
    with uproot.recreate(path) as file:
        tree = file.mktree("t", {"x": "f8"})
        for rows in (30, 10, 25):
            tree.extend({"x": np.arange(rows, dtype="f8")})
    layout = index(str(path)).files[0].layouts["x"]
    borders = layout.borders()
    assert borders is not None and borders.tolist() == [0, 30, 40]
    assert layout.block_rows == 30


def test_a_rank_reads_only_the_baskets_of_its_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "events.root", events(160))
    layout = index(path, ["Muon_pt"]).files[0].layouts["Muon_pt"]
    rows = RowSelection(np.array([20, 70]), np.array([40, 71]), np.arange(21))
    requests = list(layout.requests(rows, np.empty(21, object), ChunkCache(0)))
    with uproot.open(path) as file:
        seek = file["events"]["Muon_pt"].member("fBasketSeek")
    assert np.sort(np.concatenate([request.offset for request in requests])).tolist() == seek[[1, 2, 4]].tolist()


def test_the_index_is_small(tmp_path: Path) -> None:
    path = write(tmp_path / "events.root", events(3200))
    assert len(pickle.dumps(index(path))) < 7 * 200 * 16 + 8000  # two integers for each basket


@needs_corpus
def test_a_structure_is_read_by_its_members_or_as_a_whole() -> None:
    path = _corpus("uproot-HZZ-objects.root")
    whole = index(path, ["jetp4"])
    assert whole.fields["jetp4"].dtype.names == ("fP", "fE")
    energies = index(path, ["jetp4.fE"])
    jets = every_row(whole, "jetp4")
    assert all(np.array_equal(a["fE"], b) for a, b in zip(jets, every_row(energies, "jetp4.fE"), strict=True))
    layouts = index(path, ["jetp4.*"]).files[0].layouts
    assert len(layouts) == 4
    assert len({id(layout.table) for layout in layouts.values()}) == 1  # their baskets are read once
    with pytest.raises(FieldNotFound, match=r"'jetp4\.fQ'"):
        index(path, ["jetp4.fQ"])


@needs_corpus
def test_short_names_of_branches_in_branches() -> None:
    path = _corpus("uproot-issue-214.root")
    found = index(path, ["hits.id"])
    full = index(path, ["Evt/hits/hits.id"])
    pairs = zip(every_row(found, "hits.id"), every_row(full, "Evt/hits/hits.id"), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)
    with pytest.raises(FormatError, match=r"(?s)'Evt/hits'.*'Evt/hits/\*'"):
        index(path, ["Evt/hits"])


def test_short_names_are_looked_up_once() -> None:
    looked_at: list[str] = []

    class Branch:
        def __init__(self, name: str) -> None:
            self._name = name

        @property
        def name(self) -> str:
            looked_at.append(self._name)
            return self._name

    class Tree:
        def iteritems(self, recursive: bool) -> Iterator[tuple[str, Branch]]:
            yield from ((f"event/{name}", Branch(name)) for name in names)
            yield from ((f"{part}/x", Branch("x")) for part in ("a", "b"))

    names = [f"branch{i}" for i in range(1000)]
    found = TreeBranches("file.root", "tree", Tree())
    assert [found.full_name(name) for name in names] == [f"event/{name}" for name in names]
    assert found.full_name("x") == "x" and found.full_name("a/x") == "a/x"
    assert len(looked_at) == 1002


def _corpus(name: str) -> str:
    return str(CORPUS / "particle" / "root" / name)


@needs_corpus
def test_lists_of_lists_are_arrays_of_arrays_and_no_tensors() -> None:
    data = opened(_corpus("uproot-vectorVectorDouble.root"))
    samples = data.load()["x"]
    assert [[list(inner) for inner in sample] for sample in samples][:3] == [[], [[], []], [[10.0], [], [10.0, 20.0]]]
    with pytest.raises(FormatError, match=r"(?s)'x'.*vector<.*double"):
        data.tf_dataset(2)


@needs_corpus
def test_lists_of_strings_are_ragged_tensors() -> None:
    data = opened(_corpus("uproot-stl_containers.root"), inputs="vector_string")
    samples = data.load()["vector_string"]
    assert [list(sample) for sample in samples][:2] == [[b"one"], [b"one", b"two"]]
    (batch,) = data.tf_dataset(5)
    assert batch.to_list() == [list(sample) for sample in samples]


@needs_corpus
def test_layouts_of_branches() -> None:
    found = index(_corpus("uproot-vectorVectorDouble.root"))
    assert isinstance(found.files[0].layouts["x"].table, Clusters)
    found = index(_corpus("uproot-HZZ-zstd.root"))
    assert all(isinstance(layout.table, Baskets) for layout in found.files[0].layouts.values())


@needs_corpus
def test_unreadable_branches_are_left_out_with_a_warning() -> None:
    path = _corpus("uproot-issue-214.root")
    with pytest.warns(UserWarning, match=r"(?s)left out.*usr_data.holder.*select"):
        index(path)
    with pytest.raises(FormatError, match=r"(?s)'Evt/AAObject/usr_data/usr_data.holder'.*Holder_base"):
        index(path, ["Evt/AAObject/usr_data/usr_data.holder"])


@pytest.mark.parametrize("compression", ["ZLIB", "LZ4", None])
def test_a_damaged_basket_names_branch_and_entry(tmp_path: Path, compression: str | None) -> None:
    codec = compression and getattr(uproot, compression)(4)
    path = write(tmp_path / "events.root", events(160), basket=40, compression=codec)
    damage_basket(path, "Muon_pt", 2)
    found = index(path)
    try:
        every_row(found, "Muon_pt")
    except DecodeError as error:
        assert error.file == path and error.field == "Muon_pt" and error.row == 80 and error.byte
    else:
        assert compression is None  # without a checksum
    assert len(every_row(found, "event")) == 160


def test_lack_of_memory_for_a_basket_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = opened(write(tmp_path / "events.root", events(160)))

    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("matex_data.readers.root.baskets.unpack", fail)
    with pytest.raises(OutOfMemory, match="memory ran out"):
        data.load()


def test_a_truncated_file(tmp_path: Path) -> None:
    path = write(tmp_path / "events.root", events(160))
    content = Path(path).read_bytes()
    for size in (50, 300, len(content) // 2, len(content) - 10):
        Path(path).write_bytes(content[:size])
        with pytest.raises(DataError) as caught:
            opened(path).load()
        assert path in str(caught.value)


def test_a_basket_that_was_overwritten(tmp_path: Path) -> None:
    path = write(tmp_path / "events.root", events(160))
    layout = index(path, ["event"]).files[0].layouts["event"]
    stored = np.frombuffer(Path(path).read_bytes(), np.uint8)
    begin = int(layout.table.offset[0])
    basket = stored[begin : begin + int(layout.table.nbytes[0])]
    assert unpack(basket, BASKET, path)[1] is None
    for wrong in (basket[:-1], np.zeros_like(basket)):
        with pytest.raises(ValueError, match="key"):
            unpack(wrong, BASKET, path)
    with pytest.raises(ValueError, match="entries"):
        unpack(basket, BASKET + 1, path)


def test_a_damaged_list_of_baskets_names_the_branch(tmp_path: Path) -> None:
    path = tmp_path / "x.root"
    with uproot.recreate(path, compression=None) as file:
        file.mktree("Events", {"x": "f4"}).extend({"x": np.arange(7, dtype="f4")})
    with uproot.open(path) as file:
        nbytes = file["Events/x"].member("fBasketBytes")[:1].astype(">i4").tobytes()
    content = path.read_bytes()
    at = [i for i in range(len(content)) if content.startswith(nbytes, i)]
    errors = []
    for i in at:
        path.write_bytes(content[:i] + b"\xff" + content[i + 1 :])
        try:
            open_dataset(str(path))
        except DataError as error:
            errors.append(str(error))
    assert any("the list of baskets is damaged" in error and "x.root" in error for error in errors), errors


def test_a_count_of_an_ntuple_is_bounded_by_its_bytes(tmp_path: Path) -> None:
    """A list of many records of no length keeps uproot busy for minutes."""
    path = tmp_path / "a.root"
    with uproot.recreate(path) as file:
        file.mkrntuple("events", {"x": np.arange(5)})
    with uproot.open(path) as file:
        end = file["events"].member("fSeekFooter") + file["events"].member("fNBytesFooter")
    with path.open("r+b") as stream:
        stream.seek(end - 58)  # within the count of the groups of clusters, 60 bytes in front of the checksum
        stream.write(struct.pack("<I", 1 << 9))
    with pytest.raises(FormatError, match=r"(?s)cannot be read as ROOT.*33,554,433 items in 60 bytes.*copy it again"):
        opened(str(path))
