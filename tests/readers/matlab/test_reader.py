"""MATLAB files of the versions 4 to 7: conformance suite, structures, texts, and errors."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
from mpi4py import MPI

from matex_data import FormatError, open_dataset
from tests.support.format_suite import Case, FormatSuite, same

ROWS = (150, 37, 110)


def arrays(rows: int, first: int = 0) -> dict[str, Any]:
    """Return variables with rows."""
    rng = np.random.default_rng(first)
    return {
        "event": np.arange(first, first + rows, dtype="i4"),
        "image": rng.normal(size=(rows, 5, 6)),
        "trigger": rng.integers(0, 2, rows).astype(bool),
        "run": {
            "pt": rng.normal(size=(rows, 2)).astype("f4"),
            "name": np.array([f"é{i}" for i in range(rows)], object),
        },
    }


def expected(content: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of what was written."""
    texts = np.array([text.encode() for text in content["run"]["name"]], object)
    return {
        **{name: content[name] for name in ("event", "image", "trigger")},
        "run/pt": content["run"]["pt"],
        "run/name": texts,
    }


class TestMatlab(FormatSuite):
    def write(self, folder: Path) -> Case:
        first = np.cumsum((0, *ROWS[:-1])).tolist()
        contents = [arrays(rows, start) for rows, start in zip(ROWS, first, strict=True)]
        paths = [str(folder / f"part{i}.mat") for i in range(len(ROWS))]
        for i, (path, content) in enumerate(zip(paths, contents, strict=True)):
            extra = {"scale": 2.5, "title": "of a run"}
            scipy.io.savemat(path, {**content, **extra}, do_compression=i % 2 == 0, oned_as="column" if i else "row")
        by_file = [expected(content) for content in contents]
        return Case(paths, {name: np.concatenate([file[name] for file in by_file]) for name in by_file[0]}, "event")

    def damage(self, folder: Path) -> Case:
        case = self.write(folder)
        path = Path(case.paths[1])
        path.write_bytes(path.read_bytes()[:-300])
        return case


def load(path: Any, **options: Any) -> dict[str, Any]:
    """Return all rows by matex_data."""
    return open_dataset(path, comm=MPI.COMM_SELF, **options).load()


def test_version_4(tmp_path: Path) -> None:
    content = {"x": np.arange(12.0).reshape(4, 3), "n": np.arange(4.0)}
    scipy.io.savemat(tmp_path / "a.mat", content, format="4")
    found = load(tmp_path / "a.mat")
    assert set(found) == set(content)
    for name, values in content.items():
        same(found[name], values)


def test_numbers_have_the_types_of_their_classes(tmp_path: Path) -> None:
    """MATLAB stores whole numbers of the class double as the smallest integers: the class is the first of the flags."""
    path = tmp_path / "a.mat"
    scipy.io.savemat(path, {"x": np.array([0, 10, 200], "u1")})
    content = bytearray(path.read_bytes())
    assert content[144] == 9  # uint8
    content[144] = 6  # double
    path.write_bytes(content)
    same(load(path)["x"], np.array([0.0, 10.0, 200.0]))
    cells = np.empty(2, object)
    cells[:] = [np.array([True, False]), np.array([True])]
    complex_numbers, large = np.array([1 + 2j, 3j]), np.array([2**63 + 1, 2], "u8")
    struct = {"flag": np.array([True, False]), "z": complex_numbers, "n": large}
    scipy.io.savemat(path, {"s": struct, "c": cells, "mixed": np.array([complex_numbers, large[:1]], object)})
    with pytest.warns(UserWarning, match="'mixed': cells of integers of 64 bits"):
        found = load(path)
    for name, values in struct.items():
        same(found[f"s/{name}"], values)
    assert [cell.tolist() for cell in found["c"]] == [[True, False], [True]]


def test_samples_along_the_last_axis(tmp_path: Path) -> None:
    content = {"X": np.arange(2 * 3 * 50, dtype="u1").reshape(2, 3, 50), "y": np.arange(50.0)[:, None]}
    scipy.io.savemat(tmp_path / "train.mat", content)
    found = load(tmp_path / "train.mat", inputs="X", targets="y", sample_axis=-1)
    same(found["X"], np.moveaxis(content["X"], -1, 0))
    same(found["y"], content["y"][:, 0])


def test_errors_say_what_to_select(tmp_path: Path) -> None:
    scipy.io.savemat(tmp_path / "a.mat", {"a": np.zeros((4, 2)), "b": np.zeros((5, 2)), "s": scipy.sparse.eye(4)})
    with (
        pytest.raises(FormatError, match="different numbers of samples"),
        pytest.warns(UserWarning, match="sparse"),
    ):
        load(tmp_path / "a.mat")
    same(load(tmp_path / "a.mat", inputs="b")["b"], np.zeros((5, 2)))
    with pytest.raises(FormatError, match="cannot be read"):
        load(tmp_path / "a.mat", inputs="s")
    (tmp_path / "b.mat").write_bytes(b"# Created by Octave" * 30)
    with pytest.raises(FormatError, match=r"cannot be read as MATLAB's[\s\S]*save -v7"):
        load(tmp_path / "b.mat")


@pytest.mark.parametrize("compressed", [False, True])
def test_types_of_elements_that_there_are_not(tmp_path: Path, compressed: bool) -> None:
    """SciPy ends the process at the type of the numbers within a structure."""
    scipy.io.savemat(tmp_path / "a.mat", {"s": {"a": np.arange(4.0)}})
    content = (tmp_path / "a.mat").read_bytes()
    at = content.index(np.arange(4.0).tobytes()) - 8
    damaged = content[:at] + (265).to_bytes(4, "little") + content[at + 4 :]
    if compressed:
        packed = zlib.compress(damaged[128:])
        damaged = damaged[:128] + (15).to_bytes(4, "little") + len(packed).to_bytes(4, "little") + packed
    (tmp_path / "a.mat").write_bytes(damaged)
    with pytest.raises(FormatError, match="an element of the type 265"):
        load(tmp_path / "a.mat")


@pytest.mark.parametrize(("at", "value", "found"), [(145, 8, "fewer elements than it needs"), (140, 24, "no flags")])
def test_arrays_that_are_not_what_they_say(tmp_path: Path, at: int, value: int, found: str) -> None:
    """SciPy takes what follows for imaginary parts, or for numbers, and ends the process at its type."""
    scipy.io.savemat(tmp_path / "a.mat", {"x": np.arange(60.0).reshape(20, 3), "s": {"a": np.arange(4.0)}})
    content = bytearray((tmp_path / "a.mat").read_bytes())
    content[at] = value
    (tmp_path / "a.mat").write_bytes(content)
    with pytest.raises(FormatError, match=found):
        load(tmp_path / "a.mat")


def _element(kind: int, data: bytes) -> bytes:
    return struct.pack("<II", kind, len(data)) + data + bytes(-len(data) % 8)


def _object(name: bytes) -> bytes:
    """Return a variable that is an object, such as a string, a time or a table, which SciPy does not write."""
    words = b"".join(_element(1, word) for word in (name, b"MCOS", b"string"))
    numbers = np.array([0xDD000000, 2, 1, 1, 1, 1], np.uint32)
    array = _element(6, struct.pack("<II", 13, 0)) + _element(5, struct.pack("<ii", 6, 1)) + _element(1, b"")
    return _element(
        14, _element(6, struct.pack("<II", 17, 0)) + words + _element(14, array + _element(6, bytes(numbers)))
    )


def test_objects_are_left_out(tmp_path: Path) -> None:
    """SciPy gives the numbers of the entry of the last one, by the name None."""
    path, x = tmp_path / "a.mat", np.arange(4.0)
    scipy.io.savemat(path, {"x": x[:, None]})
    path.write_bytes(path.read_bytes() + _object(b"names") + _object(b"labels"))
    assert len(scipy.io.loadmat(path)["None"]["arr"].item()) == 6
    with pytest.warns(UserWarning, match=r"left out\n  'labels': an object of MATLAB: save its values") as caught:
        assert list(load(path)) == ["x"]
    assert len(caught) == 1
    same(load(path, inputs="x")["x"], x)
    with pytest.raises(FormatError, match="an object of MATLAB"):
        load(path, inputs="labels")
