"""Vocabularies, categories, one-hot vectors and missing values, compared with pandas and scikit-learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
from mpi4py import MPI
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import OneHotEncoder

from matex_data import DataError, FieldNotFound, FormatError, concat, open_dataset
from matex_data.reading.source import Source
from tests.support.ranks import Pool

SELF = MPI.COMM_SELF
FORMATS = ("csv", "h5")
NUMBERS = ["age", "mass"]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pd.DataFrame]:
    """Return a folder with a table in two files of each format, and the table: texts and numbers, some missing."""
    folder, rng = tmp_path_factory.mktemp("table"), np.random.default_rng(3)
    rows = 120
    age = np.where(rng.random(rows) < 0.2, np.nan, rng.normal(40, 10, rows))
    mass = np.where(rng.random(rows) < 0.2, np.nan, rng.normal(70, 10, rows)).astype("f4")
    frame = pd.DataFrame(
        {
            "number": np.arange(rows),
            "species": rng.choice(["Gentoo", "Adelie", "Kaiserpinguin ä"], rows),
            "sex": rng.choice(["m", "f", ""], rows, p=[0.5, 0.3, 0.2]),
            "age": age,
            "mass": mass,
            "class": rng.integers(3, 6, rows),
        }
    )
    for first in (0, 60):
        part = frame[first : first + 60]
        part.to_csv(folder / f"{first}.csv", index=False)
        with h5py.File(folder / f"{first}.h5", "w") as file:
            for name, values in part.items():
                is_text = values.dtype.kind not in "fiu"
                file.create_dataset(str(name), data=values.tolist() if is_text else values.to_numpy())
    return folder, frame


def _load(comm: MPI.Intracomm, pattern: str, options: dict[str, Any]) -> dict[str, Any]:
    data = open_dataset(pattern, comm=comm, **options)
    names = {name: field.attributes.get("categories") for name, field in data.schema.items()}
    return {"arrays": data.load(), "categories": names, "counts": data.vocabulary("species")}


def _whole(by_rank: list[dict[str, Any]], name: str) -> Any:
    return np.concatenate([found["arrays"][name] for found in by_rank])


@pytest.mark.parametrize("format", FORMATS)
def test_categories_and_one_hot(table: tuple[Path, pd.DataFrame], pool: Pool, format: str) -> None:
    folder, frame = table
    coded = pool.run(_load, str(folder / f"*.{format}"), {"dtype": {"species": "category", "sex": "category"}})
    for name in ("species", "sex"):
        expected = frame[name].replace("", None).astype("category")
        np.testing.assert_array_equal(_whole(coded, name), expected.cat.codes)
        assert coded[0]["categories"][name] == expected.cat.categories.tolist()
    options: dict[str, Any] = {"one_hot": ["species", "class"], "derive": {"adult": "species != 'Adelie'"}}
    hot = pool.run(_load, str(folder / f"*.{format}"), {**options, "where": "(`class` > 3) & (species != 'Gentoo')"})
    chosen = frame[(frame["class"] > 3) & (frame.species != "Gentoo")]
    for name in ("species", "class"):
        encoder = OneHotEncoder(sparse_output=False, dtype=np.float32).fit(frame[[name]])
        np.testing.assert_array_equal(_whole(hot, name), encoder.transform(chosen[[name]]))
    np.testing.assert_array_equal(_whole(hot, "adult"), chosen.species != "Adelie")


@pytest.mark.parametrize("format", FORMATS)
def test_vocabularies(table: tuple[Path, pd.DataFrame], pool: Pool, format: str) -> None:
    folder, frame = table
    for found in pool.run(_vocabularies, str(folder / f"*.{format}")):
        for name, counts in found.items():
            expected = frame[name][frame[name] != ""].value_counts().sort_index()
            assert list(counts.items()) == list(expected.items())


def _vocabularies(comm: MPI.Intracomm, pattern: str) -> dict[str, dict[Any, int]]:
    data = open_dataset(pattern, inputs="age", comm=comm)  # not one of the fields that are counted
    return {name: data.vocabulary(name) for name in ("species", "sex", "class")}


RULES = {"age": "mean", "sex": "mode", "*": 7}


@pytest.mark.parametrize("format", FORMATS)
def test_missing_values_by_the_statistics_of_the_training_set(
    table: tuple[Path, pd.DataFrame], ranks: Any, format: str
) -> None:
    folder, frame = table
    options: dict[str, Any] = {"missing": RULES, "inputs": ["age", "mass", "sex", "number", "age_mask"]}
    by_size = {size: ranks(size).run(_sets, str(folder / f"*.{format}"), options) for size in (1, 2, 3)}
    for by_rank in by_size.values():
        for key in by_rank[0]:
            parts = {name: np.concatenate([found[key][name] for found in by_rank]) for name in by_rank[0][key]}
            training = "all" if key == "all" else f"{key.split()[0]} training"
            known = frame.iloc[np.sort(np.concatenate([found[training]["number"] for found in by_rank]))]
            wanted = frame.iloc[parts["number"]]
            mean = SimpleImputer().fit(known[["age"]]).transform(wanted[["age"]])[:, 0]
            np.testing.assert_allclose(parts["age"], mean, rtol=1e-14)
            mode = SimpleImputer(strategy="most_frequent", missing_values="").fit(known[["sex"]].astype(object))
            expected = mode.transform(wanted[["sex"]].astype(object))[:, 0]
            assert [text.decode() for text in parts["sex"]] == expected.tolist()
            np.testing.assert_allclose(parts["mass"], wanted.mass.fillna(7), rtol=1e-6)
            np.testing.assert_array_equal(parts["age_mask"], ~wanted.age.isna())
    whole = [
        {key: np.concatenate([found[key]["age"] for found in by_rank]).tobytes() for key in by_rank[0]}
        for by_rank in by_size.values()
    ]
    assert whole[0] == whole[1] == whole[2]  # to the last bit
    assert len({whole[0][key] for key in whole[0]}) == len(whole[0])


def _sets(comm: MPI.Intracomm, pattern: str, options: dict[str, Any]) -> dict[str, Any]:
    data = open_dataset(pattern, comm=comm, **options)
    training, held_out = data.split(0.7, 0.3, seed=1)
    folds = data.kfold(2, seed=2)
    return {
        "all": data.load(),
        "split training": training.load(),
        "split held_out": held_out.load(),
        "fold training": folds[1][0].load(),
        "fold held_out": folds[1][1].load(),
    }


def test_a_table_for_training(table: tuple[Path, pd.DataFrame], ranks: Any) -> None:
    """Stacked and shuffled batches, resumed on another number of ranks; a state of other means is refused."""
    folder, frame = table
    options: dict[str, Any] = {
        "inputs": ["age", "species", "mass"], "targets": "number", "one_hot": "species", "stack": True,
        "missing": {"*": "mean"},
    }  # fmt: skip
    hot = OneHotEncoder(sparse_output=False).fit_transform(frame[["species"]])
    filled = SimpleImputer().fit_transform(frame[NUMBERS])
    expected = np.column_stack([filled[:, 0], hot, filled[:, 1]])
    for shuffle in (True, "global"):
        found = {size: ranks(size).run(_batches, str(folder / "*.csv"), shuffle, 0, options) for size in (1, 2, 3)}
        for by_rank in found.values():
            for batches in by_rank:
                for x, y in batches:
                    np.testing.assert_allclose(x, expected[y], rtol=1e-6)
        rest = ranks(2).run(_batches, str(folder / "*.csv"), shuffle, 4, options)
        assert _numbers(rest) == _numbers(found[3])[4:]
    data = open_dataset(str(folder / "*.csv"), comm=SELF, **options)
    columns = ["age", "species[Adelie]", "species[Gentoo]", "species[Kaiserpinguin ä]", "mass"]
    assert data.schema["inputs"].attributes["columns"] == columns
    first, second = (data.split(0.5, 0.5, seed=seed)[0] for seed in (1, 2))
    with pytest.raises(DataError):
        second.batches(10, start=first.state(1))


def _batches(comm: MPI.Intracomm, pattern: str, shuffle: Any, step: int, options: dict[str, Any]) -> list[Any]:
    data = open_dataset(pattern, comm=comm, **options)
    batches = data.batches(12, shuffle=shuffle, seed=1, start=data.state(step) if step else None)
    return [(x.copy(), y.copy()) for x, y in batches]


def _numbers(by_rank: Any) -> list[set[int]]:
    return [{int(y) for _, ys in batch for y in ys} for batch in zip(*by_rank, strict=True)]


@pytest.mark.parametrize("where", ["`class` == '4'", "`class` in ['4']"])
def test_categories_of_integers_are_compared_as_texts(table: tuple[Path, pd.DataFrame], where: str) -> None:
    folder, frame = table
    found = open_dataset(str(folder / "*.h5"), comm=SELF, dtype={"class": "category"}, where=where).load()
    np.testing.assert_array_equal(found["number"], frame[frame["class"] == 4]["number"])


def test_codes_of_names_are_numbers() -> None:
    species = np.array(["a", "b", "c"])
    data = open_dataset({"species": species}, dtype={"species": "category"}, where="species > 0", comm=SELF)
    assert data.load()["species"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"missing": {"age": "medain"}}, FormatError, "'mode'"),
        ({"missing": {"aeg": 0}}, FieldNotFound, "'age'"),
        ({"missing": {"sex": "mean"}}, FormatError, "most frequent"),
        ({"one_hot": "age"}, FormatError, "no classes"),
        ({"one_hot": "spezies"}, FieldNotFound, "'species'"),
        ({"dtype": {"age": "category"}}, FormatError, "no classes"),
        ({"dtype": {"class": "category"}, "where": "`class` == 4"}, FormatError, "codes .*(.*\n)*.*`class` == '3'"),
        ({"dtype": {"class": "category"}, "derive": {"a": "`class` < 5"}}, FormatError, "codes .*(.*\n)*.*== '3'"),
    ],
)
def test_errors(table: tuple[Path, pd.DataFrame], options: Any, kind: type[DataError], text: str) -> None:
    with pytest.raises(kind, match=text):
        open_dataset(str(table[0] / "*.h5"), comm=SELF, **options)


SPECIES = np.array(["a", "b", "b", "", "c", "a"])


@pytest.mark.parametrize("then", ["nothing", "concat", "window"])
@pytest.mark.parametrize("options", [{"one_hot": "c"}, {"dtype": {"c": "category"}}])
def test_classes_are_counted_and_divided_whether_or_not_they_are_vectors(options: Any, then: str) -> None:
    data = open_dataset({"c": SPECIES, "x": np.arange(6.0)}, comm=SELF, **options)
    times = 2 if then == "concat" else 1
    data = {"nothing": data, "concat": concat([data, data]), "window": data.window(1)}[then]
    assert data.value_counts("c") == {0: 2 * times, 1: 2 * times, 2: times}
    assert data.class_weights("c") == {0: 5 / 6, 1: 5 / 6, 2: 5 / 3}
    assert data.statistics("c").counts.tolist() == [2 * times, 2 * times, times]
    if then != "window":
        assert data.derive({"a": "c == 'a'"}).load()["a"].tolist() == (SPECIES == "a").tolist() * times
        assert [len(data.where(f"c == '{name}'")) for name in ("a", "c", "d", "")] == [2 * times, times, 0, times]
        assert {key: one.mean for key, one in data.statistics("x", by="c").items()} == {0: 2.5, 1: 1.5, 2: 4.0}
        known = data.where("c != ''")
        assert [part.value_counts("c").get(1) for part in known.split(0.5, 0.5, stratify="c")] == [times, times]
        classes = [set(part.value_counts("c")) for part in known.split(0.6, 0.4, groups="c")]
        assert classes[0].isdisjoint(classes[1])
        with pytest.raises(FormatError, match="needs a value of each sample"):
            data.split(0.5, 0.5, stratify="c")


def test_vectors_have_moments_of_their_own() -> None:
    data = open_dataset({"c": SPECIES}, one_hot="c", comm=SELF)
    np.testing.assert_allclose(data.statistics("c", axis=-1).mean, [2 / 6, 2 / 6, 1 / 6])
    assert data.normalization("c")(data.load()["c"]).shape == (6, 3)


def test_vocabularies_take_one_read(table: tuple[Path, pd.DataFrame], monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Any] = []
    use_block = Source.use_block
    monkeypatch.setattr(Source, "use_block", lambda *given: (reads.append(given[2]), use_block(*given))[1])
    open_dataset(str(table[0] / "*.h5"), one_hot=["species", "sex", "class"], comm=SELF)
    assert reads == [["species", "sex", "class"]]


@pytest.mark.parametrize("vectors", ["site", "pt"])
def test_categories_of_objects_do_not_depend_on_the_condition(vectors: str) -> None:
    lists = [np.array(numbers, "i4") for numbers in ([4, 5], [], [6])]
    events = {"site": np.array(["a", "b", "c"]), "n": np.arange(3), "pt": lists}
    data = open_dataset(events, flatten="pt", one_hot=vectors, where="n > 1", comm=SELF)
    names = {"site": ["a", "c"], "pt": ["4", "5", "6"]}[vectors]  # of all objects
    assert data.schema[vectors].attributes["categories"] == names
    assert data.load()[vectors].tolist() == [[0.0] * (len(names) - 1) + [1.0]]
