"""Manifests: which tables list images, and what becomes of their columns."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from matex_data import DataError, FormatError, open_dataset
from matex_data.readers import HEAD_BYTES, detect
from tests.readers.images.test_reader import picture, save
from tests.support.format_suite import same


def write(folder: Path, text: str, name: str = "list.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def images(folder: Path, count: int = 3) -> None:
    for number in range(count):
        save(folder / "pictures" / f"{number}.png", number)


def kind(path: Path, **options: Any) -> str:
    return detect(str(path), path.read_bytes()[:HEAD_BYTES], options)


def test_columns_beside_the_images(tmp_path: Path) -> None:
    images(tmp_path)
    frame = pd.DataFrame(
        {
            "id": [7, 8, 9],
            "file": [f"pictures/{number}.png" for number in (2, 0, 1)],
            "species": ["fox", "owl, snowy", "größe"],
            "weight": [1.5, None, -2e3],
            "wild": [True, False, True],
        }
    )
    frame.to_csv(tmp_path / "list.csv", index=False)
    assert kind(tmp_path / "list.csv") == "images"
    data = open_dataset(tmp_path / "list.csv")
    found = data.load()
    assert list(data.schema) == ["image", "id", "species", "weight", "wild", "path"]
    same(found["image"], np.stack([picture(number) for number in (2, 0, 1)]))
    same(found["id"], frame["id"].to_numpy())
    same(found["weight"], frame["weight"].to_numpy())
    same(found["wild"], frame["wild"].to_numpy())
    assert [text.decode() for text in found["species"]] == frame["species"].tolist()
    assert found["path"].tolist() == [name.encode() for name in frame["file"]]


@pytest.mark.parametrize("name", ["list.csv", "metadata.jsonl"])
@pytest.mark.parametrize(
    ("ids", "dtype"),
    [
        ([2**60 + 1, 2**60 + 3, -5], np.int64),
        ([2**64 - 1, 2**63 + 1, 5], np.uint64),
        ([2**53, None, -3], np.float64),
        ([1.5, 2**53, None], np.float64),
        ([2**53 + 1, None, 5], object),
        ([2**64, 1, 2], object),
        ([2**63, -1, 2], object),
    ],
)
def test_integers_are_not_rounded(tmp_path: Path, ids: list[Any], dtype: Any, name: str) -> None:
    images(tmp_path)
    frame = pd.DataFrame(
        {"file_name": [f"pictures/{number}.png" for number in range(3)], "id": pd.Series(ids, dtype=object)}
    )
    text = frame.to_csv(index=False) if name == "list.csv" else "\n".join(map(json.dumps, frame.to_dict("records")))
    found = open_dataset(write(tmp_path, text, name)).load()["id"]
    texts = [b"" if value is None else str(value).encode() for value in ids]
    np.testing.assert_array_equal(found, np.array(texts if dtype is object else ids, dtype), strict=True)


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-8-sig", "utf-16", "utf-32"])
def test_encodings(tmp_path: Path, encoding: str) -> None:
    images(tmp_path)
    (tmp_path / "pictures" / "0.png").rename(tmp_path / "pictures" / "größe.png")
    path = tmp_path / "list.csv"
    path.write_bytes("file,größe,dünn\npictures/größe.png,grün,1\npictures/1.png,b,2\n".encode(encoding))
    assert kind(path) == "images"
    found = open_dataset(path).load()
    assert found["größe"].tolist() == ["grün".encode(), b"b"] and found["dünn"].tolist() == [1, 2]
    same(found["image"][0], picture(0))


@pytest.mark.parametrize("name", ["città", "Å", "n\u00ba"])
def test_names_that_end_with_a_byte_of_space_in_latin_1(tmp_path: Path, name: str) -> None:
    images(tmp_path, 2)
    values = ["Forlà", "à"]
    pd.DataFrame({"file": ["pictures/0.png", "pictures/1.png"], name: values}).to_csv(tmp_path / "a.csv", index=False)
    assert [text.decode() for text in open_dataset(tmp_path / "a.csv").load()[name]] == values


def test_json_lines_as_hugging_face_writes_them(tmp_path: Path) -> None:
    images(tmp_path)
    rows = [
        {"file_name": f"pictures/{number}.png", "label": number, "code": f"00{number}", "box": [1, number]}
        for number in (2, 0, 1)
    ]
    rows[1] |= {"weight": 1.5, "wild": True}
    path = write(tmp_path, "\n".join(map(json.dumps, rows)) + "\n\n", "metadata.jsonl")
    assert kind(path) == "images"
    data = open_dataset(path)
    found = data.load()
    assert list(data.schema) == ["image", "label", "code", "box", "weight", "wild", "path"]
    same(found["image"], np.stack([picture(number) for number in (2, 0, 1)]))
    same(found["label"], np.array([2, 0, 1]))
    same(found["weight"], np.array([np.nan, 1.5, np.nan]))
    assert found["code"].tolist() == [b"002", b"000", b"001"], "a text is no number"
    same(np.stack(found["box"]), np.array([[1, 2], [1, 0], [1, 1]]))
    assert found["wild"].tolist() == [b"", b"true", b""]
    assert set(open_dataset(path, format="jsonl").schema) >= {"file_name", "label"}


def test_objects_of_images_are_lists(tmp_path: Path) -> None:
    """As Hugging Face's data sets of object detection have them: lists of numbers, and of boxes, beside texts."""
    images(tmp_path)
    rows: list[dict[str, Any]] = [
        {"objects": {"bbox": [[302.0, 109, 73.5, 52], [1, 2, 3, 4]], "categories": [3, 0], "names": ["cat", "dog"]}},
        {"objects": {"bbox": [], "categories": [], "names": []}, "huge": 10**400, "mixed": [1, [2]], "ids": [2**63]},
        {"objects": None, "huge": 1, "mixed": [None], "ids": [-1]},
    ]
    lines = [json.dumps({"file_name": f"pictures/{number}.png", **row}) for number, row in enumerate(rows)]
    data = open_dataset(write(tmp_path, "\n".join(lines), "metadata.jsonl"))
    found = data.load()
    assert (data.schema["objects.bbox"].inner, data.schema["objects.categories"].inner) == ((None, 4), (None,))
    assert [boxes.tolist() for boxes in found["objects.bbox"]] == [rows[0]["objects"]["bbox"], [], []]
    assert [kinds.tolist() for kinds in found["objects.categories"]] == [[3, 0], [], []]
    assert found["objects.names"].tolist() == [b'["cat", "dog"]', b"[]", b""]
    assert found["huge"].tolist() == [b"", str(10**400).encode(), b"1"]
    assert found["mixed"].tolist() == [b"", b"[1, [2]]", b"[null]"]
    assert found["ids"].tolist() == [b"", b"[9223372036854775808]", b"[-1]"], "no type holds both"


def test_deep_objects(tmp_path: Path) -> None:
    images(tmp_path)
    deep: dict[str, Any] = {"x": 1}
    for _ in range(100):
        deep = {"a": deep}
    line = json.dumps({"file_name": "pictures/0.png", "a": deep, "b": {"c": 2}, "b.c": 3})
    found = open_dataset(write(tmp_path, line, "metadata.jsonl")).load()
    assert found["b.c"].tolist() == [3] and found["b"].tolist() == [b'{"c": 2}']
    (name,) = (name for name in found if name.startswith("a."))
    assert json.loads(found[name][0])["a"]


def test_no_depth_of_lists_is_another_error(tmp_path: Path) -> None:
    images(tmp_path)
    for depth in range(900, 1000):  # at one of which Python parses the line, and does not write it again
        write(tmp_path, '{"file_name": "pictures/0.png", "x": ' + "[" * depth + "]" * depth + "}", "metadata.jsonl")
        with contextlib.suppress(FormatError):
            open_dataset(tmp_path / "metadata.jsonl", format="images")


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv"])
@pytest.mark.parametrize("below", ["", "train/"])
def test_metadata_beside_the_images(tmp_path: Path, name: str, below: str) -> None:
    """As Hugging Face's ``imagefolder`` reads it: the folder is enough, and images that are not listed are left out."""
    images(tmp_path / below)
    folder = tmp_path if below else tmp_path / "pictures"
    below += "pictures/" if below else ""
    frame = pd.DataFrame({"file_name": [f"{below}2.png", f"./{below}0.png"], "label": [5, 7]})
    table = frame.to_csv(index=False) if name.endswith("csv") else frame.to_json(orient="records", lines=True)
    write(folder, table, name)
    with pytest.warns(UserWarning, match=rf"1 files are not in .*metadata.* left out: '{below}1.png'"):
        found = open_dataset(folder).load()
    same(found["image"], np.stack([picture(2), picture(0)]))
    assert found["label"].tolist() == [5, 7]
    with pytest.warns(UserWarning, match=rf"1 files are no images[\s\S]*open '{name}' itself"):
        assert set(open_dataset(folder, layout="flat").schema) == {"image", "path"}
    if below:
        return
    write(folder, '{"file_name": "absent.png"}\n' if name.endswith("l") else "file_name,label\nabsent.png,1\n", name)
    with pytest.warns(UserWarning, match="1 files are no images"):
        assert len(open_dataset(folder)) == 3


def test_an_empty_cell_is_no_image(tmp_path: Path) -> None:
    images(tmp_path)
    text = "image_file,mask_file,label\npictures/0.png,{},a\npictures/1.png,pictures/2.png,\n"
    path = write(tmp_path, text.format("pictures/1.png"))
    assert set(open_dataset(path).schema) == {"image", "mask", "label", "path"}
    write(tmp_path, text.format(""))
    with pytest.raises(FormatError, match=r"names no image .*row 0"):
        open_dataset(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "no object of JSON"),
        ('{"a": ' + "[" * 100_000, "no object of JSON"),
        ('{"file_name": ', "no object"),
        ('{"label": 1}', "names no image"),
    ],
)
def test_damaged_json_lines(tmp_path: Path, line: str, message: str) -> None:
    images(tmp_path)
    path = write(tmp_path, '{"file_name": "pictures/0.png"}\n' + line + "\n", "metadata.jsonl")
    with pytest.raises(FormatError, match=message):
        open_dataset(path)


def test_json_lines_without_images_are_a_table(tmp_path: Path) -> None:
    assert kind(write(tmp_path, '{"a": ' + "[" * 100_000, "metadata.jsonl")) == "jsonl"
    path = write(tmp_path, '{"file_name": "absent.png", "label": 1}\n', "metadata.jsonl")
    assert kind(path) == "jsonl"
    assert set(open_dataset(path).schema) == {"file_name", "label"}


@pytest.mark.parametrize(
    "text",
    ["0.png 65\n1.png 970\n", "0.png\t65\n1.png\t970\n", "0.png;65\n1.png;970\n", "name,label\n0.png,65\n1.png,970"],
)
def test_lists_of_labels(tmp_path: Path, text: str) -> None:
    images(tmp_path)
    path = write(tmp_path / "pictures", text, "val.txt")
    assert kind(path) == "images"
    x, y = next(iter(open_dataset(path, inputs="image", targets="label").batches(2)))
    same(x, np.stack([picture(0), picture(1)]))
    assert y.tolist() == [65, 970] and y.dtype == np.int64


def test_root_is_another_folder(tmp_path: Path) -> None:
    images(tmp_path)
    (tmp_path / "lists").mkdir()
    path = write(tmp_path / "lists", "2.png 1 0.5\n1.png 0 2\n")
    assert kind(path) == "csv"
    data = open_dataset(path, root=str(tmp_path / "pictures"))
    found = data.load()
    same(found["image"], np.stack([picture(2), picture(1)]))
    assert found["column_1"].tolist() == [1, 0] and found["column_2"].tolist() == [0.5, 2]


def test_absolute_paths_and_paths_above(tmp_path: Path) -> None:
    images(tmp_path)
    (tmp_path / "lists").mkdir()
    path = write(tmp_path / "lists", f"../pictures/2.png,1\n{tmp_path}/pictures/1.png,0\n")
    same(open_dataset(path).load()["image"], np.stack([picture(2), picture(1)]))


def test_many_files_are_found_by_listing_their_folder(tmp_path: Path) -> None:
    images(tmp_path, 50)
    path = write(tmp_path, "".join(f"pictures/{number}.png,{number}\n" for number in range(50)))
    assert open_dataset(path).load()["label"].tolist() == list(range(50))


def test_other_tables_stay_tables(tmp_path: Path) -> None:
    images(tmp_path)
    assert kind(write(tmp_path, "name,size\nnone.png,3\n")) == "csv"
    assert kind(write(tmp_path, "a,b\n1,2\n")) == "csv"
    assert kind(write(tmp_path, "BMI,age\n20.5,30\n21.5,40\n", "noname")) == "csv"


def test_missing_file(tmp_path: Path) -> None:
    images(tmp_path)
    path = write(tmp_path, "file,label\npictures/0.png,1\npictures/2.jpg,0\n")
    with pytest.raises(DataError, match=r"does not exist[\s\S]*list.csv', row 1[\s\S]*'2.png'[\s\S]*root="):
        open_dataset(path)


def test_damaged_manifests(tmp_path: Path) -> None:
    images(tmp_path)
    path = write(tmp_path, "file,label\npictures/0.png,1\npictures/1.png\n")
    with pytest.raises(FormatError, match=r"number of fields[\s\S]*row 1[\s\S]*2 fields"):
        open_dataset(path)
    with pytest.raises(FormatError, match="no column"):
        open_dataset(write(tmp_path, "a,b\n1,2\n"), format="images")
    with pytest.raises(FormatError, match="empty"):
        open_dataset(write(tmp_path, ""), format="images")
    with pytest.raises(FormatError, match=r"field of its own[\s\S]*'image'"):
        open_dataset(write(tmp_path, "file,image\npictures/0.png,1\n"))


def test_table_beside_folders(tmp_path: Path) -> None:
    images(tmp_path)
    write(tmp_path, "pictures/0.png,1\n")
    assert set(open_dataset(tmp_path).schema) == {"image", "label", "path"}
    write(tmp_path, "x,y\n1,2\n")
    assert set(open_dataset(tmp_path).schema) == {"x", "y"}
    save(tmp_path / "others" / "1.png", 1)
    with pytest.warns(UserWarning, match=r"1 files are no images[\s\S]*'list.csv'"):
        assert set(open_dataset(tmp_path).schema) == {"image", "label", "path"}
