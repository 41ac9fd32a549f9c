"""Compressed tar shards: their samples are those of the archive, which a rank decompresses once in an epoch."""

from __future__ import annotations

import bz2
import gzip
import lzma
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from matex_data import DataError, DecodeError, PartitionError, machine, open_dataset
from matex_data.index.cache import ChunkCache
from matex_data.index.model import RowSelection
from matex_data.readers import detect
from matex_data.readers.tar import compressed
from matex_data.readers.tar import rows as tar_rows
from matex_data.readers.tar.reader import index
from tests.readers.tar import test_reader as test_tar
from tests.readers.tar.test_reader import LENGTHS, pixels, sample, shards, write_tar
from tests.readers.text.test_compression import COMPRESSORS
from tests.support.format_suite import Case, FormatSuite, same
from tests.support.ranks import Pool
from tests.support.serial import every_row, random_rows

pytestmark = pytest.mark.filterwarnings("ignore:tar shards that are stored")
Pack = Callable[[bytes], bytes]


def in_members(content: bytes) -> bytes:
    """Compress to a gzip file of several members, as bgzip and parallel programs write it."""
    return b"".join(gzip.compress(content[at : at + 5000]) for at in range(0, len(content), 5000))


PACKERS: dict[str, tuple[str, Pack]] = {
    ".tar.gz": ("gzip", gzip.compress),
    ".tgz": ("gzip", in_members),
    ".tar.bz2": ("bz2", bz2.compress),
    ".tar.xz": ("xz", lzma.compress),
    ".tar.zst": ("zstd", COMPRESSORS["zstd"]),
    "": ("gzip", gzip.compress),
}


def compressed_shards(folder: Path) -> list[Path]:
    """Write the shards of the tests of plain ones, and replace each by a compressed one."""
    paths = []
    for path in shards(folder):
        paths.append(path.with_name(path.name + ".gz"))
        paths[-1].write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    return paths


def content_of(samples: int, folder: Path) -> bytes:
    path = write_tar(folder / "content", {name: data for i in range(samples) for name, data in sample(i).items()})
    return Path(path).read_bytes()


class TestCompressedTar(FormatSuite):
    def write(self, folder: Path) -> Case:
        case = test_tar.TestTar().write(folder)
        for path in folder.glob("*.tar"):
            path.unlink()
        compressed_shards(folder)
        return Case(str(folder / "shard-{000..002}.tar.gz"), case.expected, case.identity)

    def damage(self, folder: Path) -> Case:
        path = compressed_shards(folder)[0]
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0x10
        path.write_bytes(content)
        return Case(str(folder / "*.tar.gz"), {}, "json")


@pytest.mark.parametrize("suffix", PACKERS)
def test_each_compression(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar_rows, "REQUEST_BYTES", 3000)
    path, (packing, pack) = tmp_path / f"shard{suffix}", PACKERS[suffix]
    path.write_bytes(pack(content_of(20, tmp_path)))
    assert detect(str(path), path.read_bytes()) == "tar"
    found = index(str(path))
    assert packing in found.files[0].layouts["png"].notice
    assert every_row(found, "json").tolist() == [sample(i)[f"train/{i:06d}.json"] for i in range(20)]
    for seed in range(3):
        images, numbers = random_rows(found, "png", np.random.default_rng(seed))
        same(images, np.array([pixels(number) for number in numbers.tolist()]))


def test_a_compressed_table_is_no_shard(tmp_path: Path) -> None:
    path = tmp_path / "table"
    path.write_bytes(gzip.compress(b"name,ustar\n" + b"".join(b"%d,%d\n" % (i, i * i) for i in range(500))))
    assert detect(str(path), path.read_bytes()) == "csv"


def test_members_are_decoded_by_all_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request reads the shard; the others, which wait for it, decode a part of the samples each."""
    monkeypatch.setattr(tar_rows, "REQUEST_BYTES", 3000)
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(content_of(40, tmp_path)))
    layout = index(str(path)).files[0].layouts["png"]
    rows = RowSelection(np.array([0]), np.array([40]), np.arange(40))
    first, *others = layout.requests(rows, np.empty((40, 12, 10, 3), np.uint8), ChunkCache(0))
    assert first.total == path.stat().st_size and len(others) > 3 and not any(request.total for request in others)


def test_the_index_has_no_data(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(content_of(200, tmp_path)))
    assert len(pickle.dumps(index(str(path)))) < 200 * 4 * 8 + 4000


def _epochs(comm: MPI.Intracomm, path: str, window_bytes: int | None) -> list[tuple[list[Any], list[int]]]:
    """Return the batches of two epochs, and the sizes of what this rank decompressed for them."""
    sizes: list[int] = []

    def unpack(stored: NDArray[Any], packing: str, nbytes: int) -> Any:
        sizes.append(nbytes)
        return plain(stored, packing, nbytes)

    plain, compressed.unpack = compressed.unpack, unpack
    try:
        data = open_dataset(path, comm=comm, inputs="png", targets="cls", window_bytes=window_bytes, io="collective")
        batches, found = data.batches(12, shuffle=True, seed=1, remainder="keep"), []
        for _ in range(2):
            sizes.clear()
            found.append((list(batches), list(sizes)))
        return found
    finally:
        compressed.unpack = plain


@pytest.mark.parametrize("window_bytes", [None, 6000])
def test_a_rank_decompresses_a_shard_once_in_an_epoch(tmp_path: Path, pool: Pool, window_bytes: int | None) -> None:
    """A window of 6,000 bytes has two batches, so that a shard serves several."""
    nbytes = {len(gzip.decompress(path.read_bytes())) for path in compressed_shards(tmp_path)}
    by_rank = pool.run(_epochs, str(tmp_path / "*.tar.gz"), window_bytes)
    for epoch in zip(*by_rank, strict=True):
        samples = [one for batches, _ in epoch for batch in batches for one in zip(*batch, strict=True)]
        numbers = range(sum(LENGTHS))
        assert len(samples) == len(numbers)
        assert {image.tobytes(): label for image, label in samples} == {pixels(i).tobytes(): i % 7 for i in numbers}
        assert all(len(sizes) == len(set(sizes)) for _, sizes in epoch)
        assert {size for _, sizes in epoch for size in sizes} == nbytes


def test_a_cache_that_holds_one_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where shards take turns, each is decompressed in each turn; rows of the latest one are decoded at once."""
    sizes: list[int] = []
    plain = compressed.unpack
    monkeypatch.setattr(compressed, "unpack", lambda *given: sizes.append(given[2]) or plain(*given))
    paths = compressed_shards(tmp_path)[::2]
    layouts, cache = [index(str(path)).files[0].layouts["png"] for path in paths], ChunkCache(0)
    for turn, first in ((0, 0), (0, 20), (1, 5), (0, 9)):
        out = np.zeros((2, 12, 10, 3), np.uint8)
        for request in layouts[turn].requests(RowSelection(*map(np.array, ([first], [first + 2], [1, 0]))), out, cache):
            assert request.on_complete is not None
            request.on_complete(np.fromfile(paths[turn], np.uint8)[: request.total])
        same(out, np.array([pixels(first + 71 * turn + 1), pixels(first + 71 * turn)]))
    one, other = (len(gzip.decompress(path.read_bytes())) for path in paths)
    assert sizes == [one, other, one]


def test_plain_and_compressed_shards_are_one_data_set(tmp_path: Path) -> None:
    plain, other, last = shards(tmp_path)
    other.write_bytes(gzip.compress(other.read_bytes()))
    data = open_dataset([str(plain), str(other), str(last)], inputs="png", comm=MPI.COMM_SELF)
    same(data.load()["png"], np.array([pixels(number) for number in range(sum(LENGTHS))]))


def _warnings(comm: MPI.Intracomm, path: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        open_dataset(path, comm=comm)
    return [str(one.message) for one in caught]


def test_one_rank_says_what_is_slow(tmp_path: Path, pool: Pool) -> None:
    compressed_shards(tmp_path)
    said, *others = pool.run(_warnings, str(tmp_path / "*.tar.gz"))
    assert len(said) == 1 and "gunzip" in said[0] and not any(others)


def changed(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 0x55]) + content[at + 1 :]


DAMAGED: dict[str, tuple[Pack, type[DataError], list[str]]] = {
    "truncated": (lambda content: gzip.compress(content)[:-5], DecodeError, ["does not unpack", "copy it again"]),
    "no more than its head": (lambda content: gzip.compress(content)[:300], DecodeError, ["does not unpack"]),
    "a wrong checksum": (lambda content: changed(gzip.compress(content), -8), DecodeError, ["CRC"]),
    "something behind it": (lambda content: gzip.compress(content) + b"more", DecodeError, ["does not unpack"]),
    "a truncated archive": (lambda content: gzip.compress(content[:2000]), DataError, ["truncated", "archive"]),
    "a damaged header": (
        lambda content: gzip.compress(changed(content, content.index(b"train/000001.png") + 3)),
        DataError,
        ["header of a member", "byte counted in the decompressed archive"],
    ),
    "a damaged image": (
        lambda content: gzip.compress(changed(content, content.index(b"IDAT", content.index(b"000002.png")) + 20)),
        DecodeError,
        ["row 2", "field 'png'", "byte counted in the decompressed archive"],
    ),
    "no samples": (lambda _: gzip.compress(bytes(10240)), DataError, ["no samples"]),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damage(tmp_path: Path, case: str) -> None:
    damage, kind, words = DAMAGED[case]
    path = tmp_path / "a.tar.gz"
    path.write_bytes(damage(content_of(5, tmp_path)))
    with pytest.raises(kind) as caught:
        open_dataset(str(path), comm=MPI.COMM_SELF).load()
    assert all(word in str(caught.value) for word in [*words, repr(str(path))]), caught.value


@pytest.mark.parametrize("packing", [".tar.gz", ".tgz", ".tar.bz2"])
def test_damage_after_the_shard_is_indexed(tmp_path: Path, packing: str) -> None:
    path = tmp_path / f"a{packing}"
    path.write_bytes(PACKERS[packing][1](content_of(5, tmp_path)))
    found, content = index(str(path)), path.read_bytes()
    path.write_bytes(changed(content, len(content) // 2))
    with pytest.raises(DecodeError, match="does not unpack"):
        every_row(found, "png")


def test_damaged_images_can_be_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    path.write_bytes(DAMAGED["a damaged image"][0](content_of(9, tmp_path)))
    data = open_dataset(str(path), comm=MPI.COMM_SELF, inputs="png", targets="cls", on_error="skip")
    with pytest.warns(UserWarning, match="skipped"):
        labels = [label for _, labels in data.batches(4, remainder="keep") for label in labels]
    assert labels == [0, 1, 3, 4, 5, 6, 0, 1]
    assert [skipped.row for skipped in data.skipped] == [2]


def test_a_shard_that_does_not_fit_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(content_of(5, tmp_path)))
    found = index(str(path))
    monkeypatch.setattr(machine, "free_memory", lambda: 4000)
    monkeypatch.setattr(machine, "UNCHECKED", 0)
    for read in (lambda: index(str(path)), lambda: every_row(found, "png")):
        with pytest.raises(PartitionError, match="does not fit into the memory") as caught:
            read()
        assert "gunzip" in str(caught.value.remedy)


def test_sorted_shards_are_not_well_mixed(tmp_path: Path) -> None:
    for number in range(3):
        path = tmp_path / f"{number}.tar.gz"
        path.write_bytes(gzip.compress(content_of(30, tmp_path)))
    data = open_dataset(str(tmp_path / "*.tar.gz"), inputs="cls", comm=MPI.COMM_SELF, window_bytes=1)
    with pytest.warns(UserWarning, match="Unpack the files"):
        data.batches(30, shuffle=True, seed=1)
