"""Image files: conformance suite, layouts, and what is opened how often."""

from __future__ import annotations

import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from PIL import Image
from typer.testing import CliRunner

from matex_data import DataError, DecodeError, FieldNotFound, FormatError, machine, open_dataset
from matex_data.cli.commands import app
from matex_data.readers import HEAD_BYTES, detect
from matex_data.readers.images.folders import files, headers
from tests.support.format_suite import Case, FormatSuite, same
from tests.support.ranks import Pools

SIZE = (6, 5)


def picture(seed: int, size: tuple[int, int] = SIZE, channels: int | None = 3) -> Any:
    shape = size if channels is None else (*size, channels)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def save(path: Path, seed: int, size: tuple[int, int] = SIZE, channels: int | None = 3) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture(seed, size, channels)).save(path)
    return path


def pixels(path: Path) -> Any:
    with Image.open(path) as image:
        return np.asarray(image)


def write_classes(folder: Path, counts: tuple[int, ...] = (50, 41, 40)) -> list[Path]:
    """Write a folder per class; return the files in the order of the samples."""
    paths = []
    for label, count in enumerate(counts):
        for number in range(count):
            paths.append(save(folder / f"class{label}" / f"image{number}.png", len(paths)))
    return paths


class TestImages(FormatSuite):
    storable = False  # files that change are noticed as they are opened

    def write(self, folder: Path) -> Case:
        paths = write_classes(folder)
        labels = [int(path.parent.name[-1]) for path in paths]
        names = [str(path.relative_to(folder)).encode() for path in paths]
        expected = {
            "image": np.stack([pixels(path) for path in paths]),
            "label": np.array(labels, np.int64),
            "path": np.array(names, object),
        }
        return Case(str(folder), expected, "path")

    def damage(self, folder: Path) -> Case:
        path = write_classes(folder)[70]
        path.write_bytes(path.read_bytes()[:60])
        return Case(str(folder), {}, "path")


def test_classes_are_sorted_and_named_in_the_schema(tmp_path: Path) -> None:
    for name in ("zebra", "ant", "mole"):
        save(tmp_path / name / "1.png", 1)
    data = open_dataset(tmp_path)
    assert data.schema["label"].attributes["class_names"] == ("ant", "mole", "zebra")
    assert data.load()["label"].tolist() == [0, 1, 2]
    assert data.paths == (f"{tmp_path}/",)


def test_small_files_are_blocks_of_their_own(tmp_path: Path) -> None:
    """The first batch waits for few of them, and sorted classes are shuffled as if all files were drawn from."""
    write_classes(tmp_path, (1100,))
    quality = open_dataset(tmp_path, comm=MPI.COMM_SELF).shuffle_quality(10)
    assert (quality.blocks, quality.samples_per_window) == (1100, 370)  # three windows for the least of 512 blocks
    assert quality.ratio < 1.05


def test_imagenet_below_a_single_folder(tmp_path: Path) -> None:
    for number, name in enumerate(("n02", "n01")):
        image = Image.fromarray(picture(number))
        (tmp_path / "train" / name).mkdir(parents=True)
        image.save(tmp_path / "train" / name / f"{name}_7.JPEG", "JPEG")
    data = open_dataset(tmp_path, targets="label", inputs="image")
    assert data.schema["label"].attributes["class_names"] == ("n01", "n02")
    assert len(data) == 2


def test_files_are_sorted_with_numbers_by_value(tmp_path: Path) -> None:
    for number in (10, 9, 1, 100):
        save(tmp_path / f"scan{number}.png", number)
    names = open_dataset(tmp_path).load()["path"].tolist()
    assert names == [b"scan1.png", b"scan9.png", b"scan10.png", b"scan100.png"]


def test_glob_list_and_single_file(tmp_path: Path) -> None:
    first, second = save(tmp_path / "a" / "1.png", 1), save(tmp_path / "b" / "2.bmp", 2)
    expected = np.stack([pixels(first), pixels(second)])
    for paths in ([first, second], str(tmp_path / "*" / "*")):
        data = open_dataset(paths)
        assert set(data.schema) == {"image", "path"}
        same(data.load()["image"], expected)
        assert data.load()["path"].tolist() == [b"a/1.png", b"b/2.bmp"]
    same(open_dataset(second).load()["image"], expected[1:])
    labelled = open_dataset([first, second], layout="classes").load()
    assert labelled["label"].tolist() == [0, 1]


def test_hidden_and_foreign_files_are_reported_once(tmp_path: Path) -> None:
    write_classes(tmp_path, (2, 2))
    for name in (".DS_Store", "class0/notes.txt", "class1/.hidden.png", "class1/Thumbs.db", "README.md"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.warns(UserWarning, match=r"5 files are no images and are left out: '.DS_Store'") as warned:
        data = open_dataset(tmp_path)
    assert len(warned) == 1
    assert len(data) == 4


def test_pairs_by_stem(tmp_path: Path) -> None:
    for number in (2, 10):
        save(tmp_path / "images" / f"{number}.png", number)
        save(tmp_path / "masks" / f"{number}.bmp", number, channels=None)
    save(tmp_path / "previews" / "2.png", 1)
    with pytest.warns(UserWarning, match="1 files lie beside the folders of images and masks.*'previews/2.png'"):
        found = open_dataset(tmp_path, inputs="image", targets="mask")
    images, masks = next(iter(found.batches(2)))
    same(images, np.stack([picture(2), picture(10)]))
    same(masks, np.stack([picture(2, channels=None), picture(10, channels=None)]))


def test_masks_are_resized_by_nearest(tmp_path: Path) -> None:
    save(tmp_path / "Images" / "1.png", 1, (8, 8))
    save(tmp_path / "gt" / "1_mask.png", 2, (16, 16), None)
    found = open_dataset(tmp_path, size=(4, 4), mode="rgb", dtype="float32").load()
    image = Image.fromarray(picture(2, (16, 16), None)).resize((4, 4), Image.Resampling.NEAREST)
    same(found["mask"][0], np.asarray(image))
    assert found["image"].dtype == np.float32 and found["image"].shape == (1, 4, 4, 3)


@pytest.mark.parametrize("without", ["images", "masks"])
def test_every_stem_needs_both(tmp_path: Path, without: str) -> None:
    for number in range(3):
        save(tmp_path / "images" / f"{number}.png", number)
        save(tmp_path / "masks" / f"{number}.png", number)
    (tmp_path / without / "1.png").unlink()
    with pytest.raises(FormatError, match=rf"no counterpart[\s\S]*/1.png[\s\S]*folder '{without}'"):
        open_dataset(tmp_path)


def write_pages(path: Path, seeds: list[int]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    first, *others = [Image.fromarray(picture(seed, channels=None)) for seed in seeds]
    first.save(path, save_all=True, append_images=others)
    return path


def test_pages_are_samples(tmp_path: Path) -> None:
    write_pages(tmp_path / "a" / "1.tif", [1, 2, 3])
    write_pages(tmp_path / "a" / "2.tif", [4])
    write_pages(tmp_path / "b" / "1.tif", [5, 6])
    found = open_dataset(tmp_path).load()
    same(found["image"], np.stack([picture(seed, channels=None) for seed in range(1, 7)]))
    assert found["label"].tolist() == [0, 0, 0, 0, 1, 1]
    assert found["path"].tolist() == [b"a/1.tif"] * 3 + [b"a/2.tif"] + [b"b/1.tif"] * 2
    same(open_dataset(tmp_path, pages="first").load()["image"], found["image"][[0, 3, 4]])
    assert len(open_dataset(tmp_path, inputs="label")) == 6
    shuffled = open_dataset(tmp_path).batches(2, shuffle=True, seed=1)
    for batch in shuffled:
        for image, label in zip(batch["image"], batch["label"], strict=True):
            at = [number for number in range(6) if np.array_equal(found["image"][number], image)]
            assert found["label"][at].tolist() == [label]


def test_labels_alone_need_no_equal_sizes(tmp_path: Path) -> None:
    write_pages(tmp_path / "a" / "1.tif", [1, 2])
    save(tmp_path / "b" / "1.tif", 1, (9, 9))
    assert open_dataset(tmp_path, inputs="label").load()["label"].tolist() == [0, 0, 1]


def test_pages_of_masks_pair_up(tmp_path: Path) -> None:
    write_pages(tmp_path / "images" / "1.tif", [1, 2])
    mask = write_pages(tmp_path / "masks" / "1.tif", [3, 4])
    same(open_dataset(tmp_path).load()["mask"], np.stack([picture(3, channels=None), picture(4, channels=None)]))
    write_pages(mask, [3])
    with pytest.raises(FormatError, match=r"different numbers of pages[\s\S]*masks/1.tif[\s\S]*2 pages[\s\S]*1 pages"):
        open_dataset(tmp_path)


def test_sizes_differ(tmp_path: Path) -> None:
    write_classes(tmp_path, (3, 3))
    save(tmp_path / "class1" / "image2.png", 0, (7, 9))
    with pytest.raises(FormatError) as raised:
        open_dataset(tmp_path)
    text = str(raised.value)
    assert "class1/image2.png" in text and "height 7, width 9" in text and "height 6, width 5" in text
    assert "'class0/image0.png'" in text and "size=" in text and "ragged=True" in text
    assert open_dataset(tmp_path, size=(4, 4)).load()["image"].shape == (6, 4, 4, 3)
    images = open_dataset(tmp_path, ragged=True).load()["image"]
    assert [image.shape for image in images] == [(6, 5, 3)] * 5 + [(7, 9, 3)]
    same(images[5], picture(0, (7, 9)))


def test_channels_differ(tmp_path: Path) -> None:
    save(tmp_path / "1.png", 1)
    save(tmp_path / "2.png", 2, channels=None)
    for options in ({}, {"size": (4, 4)}, {"ragged": True}):
        with pytest.raises(FormatError, match=r"channels or dtype[\s\S]*2.png[\s\S]*mode='rgb'"):
            open_dataset(tmp_path, **options)
    assert open_dataset(tmp_path, mode="gray").load()["image"].shape == (2, *SIZE, 1)


def test_image_that_is_unlike_its_header_was(tmp_path: Path) -> None:
    path = write_classes(tmp_path, (3, 3))[4]
    data = open_dataset(tmp_path)
    save(path, 0, (9, 9))
    with pytest.raises(DecodeError, match=r"differs from the others[\s\S]*image1.png[\s\S]*row 4[\s\S]*\(9, 9, 3\)"):
        data.load()
    path.unlink()
    with pytest.raises(DataError, match=r"does not exist[\s\S]*image1.png"):
        data.load()


def test_headers_are_read_in_threads_where_the_storage_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_classes(tmp_path, (200,))
    save(tmp_path / "class0" / "image150.png", 0, (7, 9))
    names, read = set(), headers.read_info

    def recorded(*arguments: Any) -> Any:
        names.add(threading.current_thread().name)
        return read(*arguments)

    monkeypatch.setattr(headers, "read_info", recorded)
    for is_slow in (False, True):
        monkeypatch.setattr(machine.Waiting, "is_long", lambda *_, slow=is_slow: slow)
        with pytest.raises(FormatError, match=r"(?s)image150\.png.*image0\.png"):
            open_dataset(tmp_path, comm=MPI.COMM_SELF)
        assert any(name.startswith("matex-headers") for name in names) == is_slow


def test_damaged_header_fails_when_it_is_read(tmp_path: Path) -> None:
    paths = write_classes(tmp_path, (3, 3))
    paths[0].write_bytes(b"no image at all")
    for options in ({}, {"size": (4, 4), "mode": "rgb"}):
        data = open_dataset(tmp_path, **options)
        assert data.schema["image"].shape[-1] == 3
        with pytest.raises(DataError, match=r"class0/image0.png"):
            data.load()
    for path in paths:
        path.write_bytes(b"no image at all")
    with pytest.raises(FormatError, match=r"class0/image0.png"):
        open_dataset(tmp_path)


def _tensors(comm: MPI.Intracomm, folder: str) -> tuple[Any, list[Any], Any]:
    """Return the shape of a batch of images, all images, and the first batch of ragged ones."""
    data = open_dataset(folder, comm=comm, inputs="image", targets="label").tf_dataset(4)
    ragged = open_dataset(folder, comm=comm, inputs="image", ragged=True).tf_dataset(4)
    images = [image.numpy() for image, _ in data]
    return tuple(data.element_spec[0].shape), images, next(iter(ragged)).to_tensor().numpy()


def test_tensors_of_classes(ranks: Pools, tmp_path: Path) -> None:
    paths = write_classes(tmp_path, (6, 6))
    ((shape, images, first),) = ranks(1).run(_tensors, str(tmp_path), timeout=120)
    assert shape == (4, *SIZE, 3)
    same(np.concatenate(images), np.stack([pixels(path) for path in paths]))
    same(first, images[0])


def test_unknown_field(tmp_path: Path) -> None:
    save(tmp_path / "1.png", 1)
    with pytest.raises(FieldNotFound, match=r"'label'[\s\S]*'image', 'path'[\s\S]*folder per class"):
        open_dataset(tmp_path, targets="label", inputs="image")


@pytest.mark.parametrize(
    "options", [{"layout": "piles"}, {"pages": "last"}, {"ragged": True, "size": (2, 2)}, {"mode": "blue"}]
)
def test_wrong_options(tmp_path: Path, options: dict[str, Any]) -> None:
    save(tmp_path / "1.png", 1)
    with pytest.raises(FormatError):
        open_dataset(tmp_path, **options)


def test_ambiguous_folders(tmp_path: Path) -> None:
    save(tmp_path / "both" / "1.png", 1)
    save(tmp_path / "both" / "masks" / "1.png", 1)
    with pytest.raises(FormatError, match=r"as well[\s\S]*'1.png' beside the folder 'masks'[\s\S]*layout='flat'"):
        open_dataset(tmp_path / "both")
    assert len(open_dataset(tmp_path / "both", layout="flat")) == 2
    for name in ("train", "test"):
        save(tmp_path / "splits" / name / "cat" / "1.png", 1)
    with pytest.raises(FormatError, match=r"several data sets[\s\S]*splits/test"):
        open_dataset(tmp_path / "splits")
    assert len(open_dataset([tmp_path / "splits" / "train", tmp_path / "splits" / "test"])) == 2


def test_empty_folders(tmp_path: Path) -> None:
    save(tmp_path / "data" / "cat" / "1.png", 1)
    (tmp_path / "data" / "dog").mkdir()
    with pytest.raises(DataError, match=r"folder of a class holds no images[\s\S]*data/dog"):
        open_dataset(tmp_path / "data")
    (tmp_path / "empty" / "dog").mkdir(parents=True)
    with pytest.raises(DataError, match="holds no"):
        open_dataset(tmp_path / "empty")
    with pytest.raises(DataError, match=r"folder holds no images"):
        open_dataset(tmp_path / "empty", format="images")


def test_classes_of_folders_agree(tmp_path: Path) -> None:
    for path in ("a/cat/1.png", "a/dog/1.png", "b/cat/1.png", "b/eel/1.png"):
        save(tmp_path / path, 1)
    with pytest.raises(FormatError, match=r"class_names[\s\S]*'cat', 'dog'[\s\S]*'cat', 'eel'"):
        open_dataset([tmp_path / "a", tmp_path / "b"])


def test_pictures_beside_other_data_are_no_data(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(10))
    save(tmp_path / "plot.png", 1)
    assert set(open_dataset(tmp_path).schema) != {"image", "path"}
    assert len(open_dataset(tmp_path)) == 10


def _counted(comm: MPI.Intracomm, folder: str) -> tuple[list[str], list[list[str]]]:
    """Return the files that this rank opens to index the folder, and in each of two epochs."""
    opened: list[str] = []
    lock = threading.Lock()
    read = files.read_file

    def counting(path: bytes, most: int = -1) -> bytes:
        with lock:
            opened.append(os.fsdecode(path))
        return read(path, most)

    files.read_file, headers_read = counting, headers.read_file
    headers.read_file = counting
    try:
        batches = open_dataset(folder, comm=comm, size=(4, 4), mode="rgb").batches(6, shuffle=True, seed=1)
        indexed, epochs = opened.copy(), []
        for _ in range(2):
            opened.clear()
            assert sum(len(batch["label"]) for batch in batches) * comm.size == 60
            epochs.append(opened.copy())
    finally:
        files.read_file, headers.read_file = read, headers_read
    return indexed, epochs


def test_each_file_is_opened_once_by_one_rank(ranks: Pools, tmp_path: Path) -> None:
    paths = write_classes(tmp_path, (30, 30))
    for size in (1, 3):
        by_rank = ranks(size).run(_counted, str(tmp_path))
        assert sum(len(indexed) for indexed, _ in by_rank) == 1  # size and mode are given: one header tells the dtype
        for epoch in range(2):
            counts = Counter(path for _, epochs in by_rank for path in epochs[epoch])
            assert counts == {str(path): 1 for path in paths}


def _scanned(comm: MPI.Intracomm, folder: str) -> dict[str, int]:
    """Return how often this rank lists each folder, beside the look that tells that it is one of images."""
    from matex_data.readers.images.folders import contents as folders

    listed: Counter[str] = Counter()
    entries = folders._entries
    folders._entries = lambda path: (listed.update([path]), entries(path))[1]
    try:
        open_dataset(folder, comm=comm)
    finally:
        folders._entries = entries
    return dict(listed)


def test_one_rank_lists_each_folder_once(ranks: Pools, tmp_path: Path) -> None:
    write_classes(tmp_path, (4, 4))
    first, *others = ranks(3).run(_scanned, str(tmp_path))
    assert first == {str(tmp_path): 1, f"{tmp_path}/class0": 1, f"{tmp_path}/class1": 1}
    assert others == [{}, {}]


def _global_batches(comm: MPI.Intracomm, path: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(batch) for batch in open_dataset(path, comm=comm, **options).batches(6, shuffle=True, seed=3)]


def test_pairs_and_manifests_on_several_ranks(ranks: Pools, tmp_path: Path) -> None:
    lines = ["file,score"]
    for number in range(30):
        save(tmp_path / "images" / f"{number}.png", number)
        save(tmp_path / "masks" / f"{number}.png", number + 100, channels=None)
        lines.append(f"images/{number}.png,{number / 4}")
    (tmp_path / "list.csv").write_text("\n".join(lines))
    for path, other in ((tmp_path, "mask"), (tmp_path / "list.csv", "score")):
        options: dict[str, Any] = {} if other == "score" else {"format": "images"}
        (alone,) = ranks(1).run(_global_batches, str(path), options)
        for size in (2, 3):
            by_rank = ranks(size).run(_global_batches, str(path), options)
            for step, whole in enumerate(alone):
                for name in ("image", other, "path"):
                    joined = np.concatenate([batches[step][name] for batches in by_rank])
                    order, expected = (
                        np.argsort(names.astype(str)) for names in (_paths(by_rank, step), whole["path"])
                    )
                    same(joined[order], whole[name][expected])


def _paths(by_rank: list[list[dict[str, Any]]], step: int) -> Any:
    return np.concatenate([batches[step]["path"] for batches in by_rank])


def _opened(comm: MPI.Intracomm, path: str, options: dict[str, Any]) -> int:
    return len(open_dataset(path, comm=comm, **options))


def test_errors_are_the_same_on_all_ranks(ranks: Pools, tmp_path: Path) -> None:
    write_classes(tmp_path / "sizes", (3, 3))
    save(tmp_path / "sizes" / "class1" / "image2.png", 0, (7, 9))
    (tmp_path / "empty" / "cat").mkdir(parents=True)
    (tmp_path / "list.csv").write_text("path,label\nsizes/class0/image0.png,1\nsizes/class0/none.png,2\n")
    cases = (("sizes", "differ in size"), ("empty", "holds no images"), ("list.csv", "does not exist"))
    for name, problem in cases:
        for size in (1, 3):
            options = {"format": "images"}
            outcomes = ranks(size).outcomes(_opened, str(tmp_path / name), options, timeout=30)
            assert all(isinstance(error, DataError) for error in outcomes), outcomes
            assert len({str(error) for error in outcomes}) == 1 and problem in str(outcomes[0])


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "BMP", "GIF", "WEBP"])
def test_images_are_detected_by_content(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "scan"
    Image.fromarray(picture(1)).save(path, kind)
    assert detect(str(path), path.read_bytes()[:HEAD_BYTES]) == "images"
    assert open_dataset(path).load()["image"].shape[:3] == (1, *SIZE)


def test_commands_take_folders(tmp_path: Path) -> None:
    write_classes(tmp_path, (20, 20))
    runner = CliRunner()
    for command in ("inspect", "validate", "bench"):
        done = runner.invoke(app, [command, str(tmp_path)])
        assert done.exit_code == 0, done.output
        assert ("class_names" in done.output) == (command == "inspect")


def test_skipped_images(tmp_path: Path) -> None:
    paths = write_classes(tmp_path, (6, 6))
    paths[3].write_bytes(paths[3].read_bytes()[:60])
    paths[8].write_bytes(b"no image at all")
    data = open_dataset(tmp_path, on_error="skip")
    with pytest.warns(UserWarning, match=r"image3.png"):
        found = np.concatenate([batch["path"] for batch in data.batches(4, shuffle=True, seed=1)])
    assert len(found) == 10
    assert [skipped.file for skipped in data.skipped] == [str(paths[3]), str(paths[8])]
