"""Tar shards: conformance suite, kinds of members, archives by other programs, damage; expected values by Pillow."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from mpi4py import MPI
from numpy.typing import NDArray
from PIL import Image

from matex_data import DataError, DecodeError, FieldNotFound, FormatError, open_dataset
from matex_data.readers import detect
from matex_data.readers.tar import rows as tar_rows
from matex_data.readers.tar.headers import ByteRange, open_archive, read_shard
from matex_data.readers.tar.reader import index
from tests.support.format_suite import Case, FormatSuite, same
from tests.support.ranks import Pool
from tests.support.serial import every_row, random_rows

LENGTHS = (70, 1, 41)


def pixels(number: int, shape: tuple[int, ...] = (12, 10, 3)) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, shape, np.uint8)


def encoded(image: NDArray[Any], kind: str = "png", **options: Any) -> bytes:
    memory = io.BytesIO()
    Image.fromarray(image).save(memory, kind, **options)
    return memory.getvalue()


def write_tar(path: Path, members: Mapping[str, bytes], format: int = tarfile.PAX_FORMAT) -> str:
    with tarfile.open(path, "w", format=format) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return str(path)


def sample(number: int) -> dict[str, bytes]:
    key = f"train/{number:06d}"
    return {
        f"{key}.png": encoded(pixels(number)),
        f"{key}.cls": b"%d" % (number % 7),
        f"{key}.json": json.dumps({"number": number}).encode(),
        f"{key}.box.npy": saved(np.full(4, number, ">f4")),
    }


def saved(array: NDArray[Any]) -> bytes:
    memory = io.BytesIO()
    np.save(memory, array)
    return memory.getvalue()


def shards(folder: Path) -> list[Path]:
    paths, first = [], 0
    for number, count in enumerate(LENGTHS):
        paths.append(folder / f"shard-{number:03d}.tar")
        members = {name: data for i in range(first, first + count) for name, data in sample(i).items()}
        write_tar(paths[-1], members)
        first += count
    return paths


class TestTar(FormatSuite):
    def write(self, folder: Path) -> Case:
        shards(folder)
        numbers = range(sum(LENGTHS))
        expected = {
            "png": np.array([pixels(number) for number in numbers]),
            "cls": np.array([number % 7 for number in numbers]),
            "json": np.array([b'{"number": %d}' % number for number in numbers], object),
            "box.npy": np.array([[number] * 4 for number in numbers], np.float32),
        }
        return Case(str(folder / "shard-*.tar"), expected, "json")

    def damage(self, folder: Path) -> Case:
        path = shards(folder)[0]
        content = path.read_bytes()
        begin = content.index(b"IDAT", content.index(b"000033.png"))
        path.write_bytes(content[: begin + 8] + bytes(40) + content[begin + 48 :])
        return Case(str(folder / "*.tar"), {}, "json")


def test_random_rows_of_each_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar_rows, "REQUEST_BYTES", 3000)
    found = index(str(shards(tmp_path)[0]))
    for seed in range(5):
        images, numbers = random_rows(found, "png", np.random.default_rng(seed))
        same(images, np.array([pixels(number) for number in numbers.tolist()]))
        labels, numbers = random_rows(found, "cls", np.random.default_rng(seed))
        assert labels.tolist() == (numbers % 7).tolist()


def test_members_of_neighbouring_samples_are_one_read(tmp_path: Path) -> None:
    found = index(str(shards(tmp_path)[0]))
    table = found.files[0].layouts["png"].table  # type: ignore[attr-defined]
    spans = table._spans(np.arange(70), np.arange(4))
    assert len(spans.offset) == 1
    assert table.stored_bytes() == spans.nbytes.sum() <= Path(found.files[0].path).stat().st_size
    assert len(table._spans(np.array([0, 1, 5, 9]), np.array([1])).offset) == 3


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_order_names_and_foreign_members(tmp_path: Path, format: int) -> None:
    long = "folder/" + "x" * 90 + "/" + "y" * 60
    members = {
        "b.JPG": encoded(pixels(1), "jpeg"),
        f"{long}.jpg": encoded(pixels(2), "jpeg"),
        "._b.JPG": b"resource fork",
        "folder.d/.hidden": b"",
        "README": b"text",
        f"{long}.cls": b" 12\n",
        "b.cls": b"-3",
    }
    path = write_tar(tmp_path / "shard.tar", members, format)
    with tarfile.open(path, "a") as archive:
        folder = tarfile.TarInfo("folder.f.jpg")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        link = tarfile.TarInfo("c.jpg")
        link.type, link.linkname = tarfile.LNKTYPE, "b.JPG"
        archive.addfile(link)
        link.name, link.linkname = "c.cls", "b.cls"
        archive.addfile(link)
    with pytest.warns(UserWarning, match="'README'"):
        found = index(path)
    assert every_row(found, "cls").tolist() == [-3, 12, -3]
    with Image.open(io.BytesIO(members["b.JPG"])) as image:
        assert np.abs(every_row(found, "jpg")[2].astype(int) - np.asarray(image)).max() <= 2


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_links_to_nothing(tmp_path: Path, kind: bytes) -> None:
    path = write_tar(tmp_path / "shard.tar", {"b.png": encoded(pixels(1))})
    with tarfile.open(path, "a") as archive:
        for name in ("latest", "c.png"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = kind, "absent.png"
            archive.addfile(link)
    with pytest.raises(FormatError, match=r"is a link(.|\n)*'c.png', a link to 'absent.png'"):
        index(path)


@pytest.mark.parametrize("format", ["gif", "webp"])
def test_frames_of_a_member_are_not_lost(tmp_path: Path, format: str) -> None:
    frames = [Image.fromarray(np.full((8, 8, 3), 40 * i, "u1")) for i in range(3)]
    for number in (1, 3):
        data = io.BytesIO()
        frames[0].save(data, format, save_all=True, append_images=frames[1:number])
        path = write_tar(tmp_path / "shard.tar", {f"0.{format}": data.getvalue()})
        if number == 1:
            assert len(every_row(index(path), format)) == 1
            continue
        with pytest.raises(DecodeError, match=r"several pages(.|\n)*3 pages"):
            every_row(index(path), format)


def test_an_archive_of_the_tar_program(tmp_path: Path) -> None:
    for number in range(4):
        for name, data in sample(number).items():
            (tmp_path / Path(name).name).write_bytes(data)
    names = sorted(path.name for path in tmp_path.iterdir())
    subprocess.run(["tar", "cf", "all.tar", *sorted(names, key=lambda name: name[6:])], cwd=tmp_path, check=True)
    path = str(tmp_path / "all.tar")
    assert detect(path, Path(path).read_bytes()) == "tar"
    same(every_row(index(path), "png"), np.array([pixels(number) for number in range(4)]))


def test_size_and_mode_need_one_header(tmp_path: Path) -> None:
    images = [pixels(0), pixels(1, (30, 20)), pixels(2, (9, 40, 3))]
    path = write_tar(tmp_path / "a.tar", {f"{i}.png": encoded(image) for i, image in enumerate(images)})
    with pytest.raises(FormatError, match="size") as caught:
        index(path)
    assert all(
        word in str(caught.value)
        for word in ("'0.png'", "'1.png'", "height 12, width 10", "height 30, width 20", "size=", path)
    )
    found = every_row(index(path, size=(8, 6), mode="rgb"), "png")
    for row, image in zip(found, images, strict=True):
        wanted = Image.fromarray(image).convert("RGB").resize((6, 8), Image.Resampling.BILINEAR)
        assert np.abs(row.astype(int) - np.asarray(wanted)).max() <= 1


def test_images_of_different_sizes(tmp_path: Path) -> None:
    images = [pixels(0), pixels(1, (30, 20, 3)), pixels(2, (9, 40, 3))]
    path = write_tar(tmp_path / "a.tar", {f"{i}.png": encoded(image) for i, image in enumerate(images)})
    found = index(path, ragged=True)
    assert found.fields["png"].sample_shape == (None, None, 3)
    for row, image in zip(every_row(found, "png"), images, strict=True):
        same(row, image)
    with pytest.raises(FormatError, match="not ragged"):
        index(path, ragged=True, size=(4, 4))
    assert found.files[0].layouts["png"].inner_bytes() == sum(image.nbytes for image in images)


def test_masks_keep_their_numbers(tmp_path: Path) -> None:
    mask = np.zeros((10, 10), np.uint8)
    mask[5:], mask[:, 5:] = 3, 250
    members = {"a.jpg": encoded(pixels(0, (10, 10, 3)), "jpeg"), "a.seg.png": encoded(mask)}
    path = write_tar(tmp_path / "a.tar", members)
    found = index(path, size=(7, 7), mode="rgb", dtype="float32")
    assert found.fields["jpg"].shape == (7, 7, 3) and found.fields["jpg"].dtype == np.float32
    assert found.fields["seg.png"].shape == (7, 7)
    assert set(np.unique(every_row(found, "seg.png"))) == {0, 3, 250}
    assert index(path, size=(7, 7), mode="rgb", masks=[]).fields["seg.png"].shape == (7, 7, 3)
    assert every_row(index(path, raw=["jpg"]), "jpg")[0] == members["a.jpg"]


def test_damaged_images_can_be_skipped(tmp_path: Path) -> None:
    case = TestTar().damage(tmp_path)
    data = case.open(MPI.COMM_SELF, on_error="skip")
    with pytest.warns(UserWarning, match="skipped"):
        found = [json.loads(text)["number"] for batch in data.batches(8, remainder="keep") for text in batch["json"]]
    assert found == [number for number in range(sum(LENGTHS)) if number != 33]
    assert [(Path(sample.file).name, sample.row) for sample in data.skipped] == [("shard-000.tar", 33)]


def stack(pages: int) -> bytes:
    memory = io.BytesIO()
    tifffile.imwrite(memory, np.zeros((pages, 8, 9), "u1"), photometric="minisblack", truncate=True)
    return memory.getvalue()


ERRORS = {
    "a member is missing": ({"0.png": b"", "0.cls": b"1", "1.png": b""}, FormatError, ["'1.cls'", "row 1"]),
    "no integer": ({"0.cls": b"1", "1.cls": b"cat"}, DecodeError, ["b'cat'", "raw=", "row 1", "byte 1536"]),
    "an integer too large": ({"0.cls": b"9" * 19}, DecodeError, ["64-bit"]),
    "no samples": ({"README": b"1"}, FormatError, ["no samples", "'README'", "a name of a key and an extension"]),
    "other arrays": ({"0.npy": saved(np.zeros(3)), "1.npy": saved(np.zeros(4))}, DecodeError, ["(3,)", "(4,)"]),
    "no array": ({"0.npy": b"zero"}, FormatError, ["header of the array"]),
    "objects": ({"0.npy": saved(np.array([{}], object))}, FormatError, ["Python objects"]),
    "no image": ({"0.png": b"text"}, DataError, ["'0.png'"]),
    "a stack": ({"0.tif": stack(1), "1.tif": stack(3)}, DecodeError, ["3 pages", "row 1", "raw="]),
    "a damaged image": ({"0.png": encoded(pixels(0)), "1.png": b"text"}, DataError, ["row 1"]),
}


@pytest.mark.filterwarnings("ignore:1 files")
@pytest.mark.parametrize("case", ERRORS)
def test_errors(tmp_path: Path, case: str) -> None:
    members, kind, words = ERRORS[case]
    path = write_tar(tmp_path / "a.tar", members)
    with pytest.raises(kind) as caught:
        open_dataset(path, comm=MPI.COMM_SELF).load()
    assert all(word in str(caught.value) for word in [*words, repr(path)]), caught.value


def test_a_sparse_member_is_no_damage(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("0.txt")
        info.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": "9"}
        archive.addfile(info)
    with pytest.raises(FormatError, match=r"sparse file(.|\n)*without tar's option --sparse"):
        open_dataset(tmp_path / "a.tar", comm=MPI.COMM_SELF)


def test_a_field_of_only_some_samples_can_be_left_out(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {"0.txt": b"x", "0.cls": b"1", "1.txt": b"y"})
    assert open_dataset(path, inputs="txt", comm=MPI.COMM_SELF).load()["txt"].tolist() == [b"x", b"y"]
    with pytest.raises(FieldNotFound, match="'txt'"):
        index(path, ["text"])


def test_two_members_of_one_name(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {"0.cls": b"1"})
    with tarfile.open(path, "a") as archive:
        archive.addfile(tarfile.TarInfo("0.cls"))
    with pytest.raises(FormatError, match=r"two members.*row 0, byte 1536"):
        index(path)


def test_two_archives_in_one_file(tmp_path: Path) -> None:
    first, second = (Path(write_tar(tmp_path / f"{i}.tar", {f"{i}.cls": b"1"})) for i in range(2))
    first.write_bytes(first.read_bytes() + second.read_bytes())
    with pytest.raises(FormatError, match="behind the mark") as caught:
        index(str(first))
    assert caught.value.byte == second.stat().st_size


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    content = Path(write_tar(tmp_path / "a.tar", {**sample(0), **sample(1)})).read_bytes()
    end = len(content.rstrip(b"\0")) // 512 * 512 + 512
    path = tmp_path / "b.tar"
    for length in (*range(0, end, 100), end - 1, end, end + 511):
        path.write_bytes(content[:length])
        with pytest.raises(FormatError):
            index(str(path))
    path.write_bytes(content[: end + 512])
    assert len(index(str(path))) == 2


def _members(path: str) -> dict[str, dict[int, ByteRange]]:
    with open_archive(path) as archive:
        return read_shard(path, archive.file).members


def test_damaged_headers(tmp_path: Path) -> None:
    whole = write_tar(tmp_path / "a.tar", {name: data for i in range(3) for name, data in sample(i).items()})
    content, random = bytearray(Path(whole).read_bytes()), np.random.default_rng(0)
    wanted = _members(whole)
    headers = [
        range(begin, begin + 512) for begin in range(0, len(content), 512) if b"ustar" in content[begin : begin + 512]
    ]
    assert len(headers) == 12
    path = tmp_path / "b.tar"
    for number in range(400):
        damaged = content.copy()
        for at in random.choice(headers[number % 12], 2):
            damaged[at] = random.integers(256)
        path.write_bytes(damaged)
        try:
            assert _members(str(path)) == wanted
        except DataError as error:
            assert error.file == str(path)


def _epoch(comm: MPI.Intracomm, path: str) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    data = open_dataset(path, comm=comm, inputs="png", targets="cls", io="collective")
    return list(data.batches(12, shuffle=True, seed=3, remainder="drop"))


def test_collective_reads(tmp_path: Path, pool: Pool) -> None:
    shards(tmp_path)
    classes = {pixels(number).tobytes(): number % 7 for number in range(sum(LENGTHS))}
    batches = [batch for batches in pool.run(_epoch, str(tmp_path / "*.tar")) for batch in batches]
    seen = [
        (image.tobytes(), int(label)) for images, labels in batches for image, label in zip(images, labels, strict=True)
    ]
    assert len({image for image, _ in seen}) == len(seen) == sum(LENGTHS) // 12 * 12
    assert all(classes[image] == label for image, label in seen)
