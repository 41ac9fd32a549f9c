"""Files as astropy and fpack write them: compressed as a whole or by the tile, spectra, tables behind an image."""

import gzip
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from astropy.io import fits
from mpi4py import MPI

import matex_data as md
from matex_data.readers.fits import columns
from tests.support.loading import check_samples
from tests.support.ranks import Pool

pytestmark = pytest.mark.rank_counts(1, 3)
RNG = np.random.default_rng(3)


def _table(rows: int) -> Any:
    lists = np.empty(rows, object)
    lists[:] = [np.arange(n % 4, dtype="i4") for n in range(rows)]
    return fits.BinTableHDU.from_columns(
        [
            fits.Column("pha", "J", array=np.arange(rows)),
            fits.Column("energy", "D", array=np.arange(rows) / 4),
            fits.Column("hits", "PJ()", array=lists),
        ],
        name="EVENTS",
    )


def test_tables_cubes_and_images_in_gzip(pool: Pool, tmp_path: Path) -> None:
    for name, rows in (("a", 7), ("b", 5)):
        _table(rows).writeto(tmp_path / f"{name}.fits.gz")
    both = [np.arange(n) for n in (7, 5)]
    wanted = {"pha": np.concatenate(both), "energy": np.concatenate(both) / 4}
    hits = [np.arange(n % 4, dtype="i4") for rows in both for n in rows]
    check_samples(pool, str(tmp_path / "*.fits.gz"), wanted | {"hits": hits})
    cube, image = RNG.integers(0, 2**16, (5, 4, 3)).astype("u2"), RNG.normal(size=(6, 4)).astype("f4")
    fits.PrimaryHDU(cube).writeto(tmp_path / "cube.fit.gz")
    check_samples(pool, str(tmp_path / "cube.fit.gz"), {"data": cube})
    for axis in (1, -1):
        assert np.array_equal(
            md.open_dataset(tmp_path / "cube.fit.gz", sample_axis=axis).load()["data"], np.moveaxis(cube, axis, 0)
        )
    for number in range(2):
        fits.PrimaryHDU(image + number).writeto(tmp_path / f"image{number}.fts.gz")
    check_samples(pool, str(tmp_path / "image*.fts.gz"), {"data": [image, image + 1]})
    content = (tmp_path / "a.fits.gz").read_bytes()
    (tmp_path / "short.fits.gz").write_bytes(content[: len(content) // 2])
    with pytest.raises(md.DataError, match="does not unpack"):
        md.open_dataset(tmp_path / "short.fits.gz")
    (tmp_path / "few.fits.gz").write_bytes(gzip.compress(gzip.decompress(content)[:-2880]))
    with pytest.raises(md.FormatError, match="truncated"):
        md.open_dataset(tmp_path / "few.fits.gz")


def test_tables_without_rows(pool: Pool, tmp_path: Path) -> None:
    """Of runs with events in one of them, the first; and such a run alone."""
    for run, rows in enumerate((0, 3, 0)):
        good = fits.BinTableHDU.from_columns([fits.Column("start", "D", array=[1.0])], name="GTI")
        fits.HDUList([fits.PrimaryHDU(), _table(rows), good]).writeto(tmp_path / f"run{run}.fits")
    check_samples(
        pool,
        str(tmp_path / "*.fits"),
        {"pha": range(3), "hits": [np.arange(i) for i in range(3)], "energy": np.arange(3) / 4},
    )
    alone = md.open_dataset(tmp_path / "run0.fits")
    assert len(alone) == len(fits.getdata(tmp_path / "run0.fits", "EVENTS")) == 0
    assert list(alone.schema) == fits.getdata(tmp_path / "run0.fits", "EVENTS").names


@pytest.mark.parametrize("dtype", ["i4", "u2"])  # with BZERO, as cameras count
def test_cubes_by_fpack(pool: Pool, tmp_path: Path, dtype: str) -> None:
    cube = RNG.integers(0, 999, (6, 5, 8)).astype(dtype)
    path = tmp_path / "cube.fits.fz"
    fits.HDUList([fits.PrimaryHDU(), fits.CompImageHDU(cube, compression_type="RICE_1")]).writeto(path)
    check_samples(pool, str(path), {"COMPRESSED_IMAGE": cube})


def _flags(comm: MPI.Intracomm, path: str) -> tuple[list[bool], list[str]]:
    """Return the logicals of all ranks, and the warnings of a rank that reads them twice."""
    columns._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = md.open_dataset(path, comm=comm)
        found = [data.load()["flag"].tolist() for _ in range(2)]
    return np.concatenate(comm.allgather(found[1])).tolist(), [str(one.message) for one in caught]


def test_undefined_logicals(tmp_path: Path, pool: Pool) -> None:
    """The standard calls a NUL undefined; a rank that reads one says once that it is False."""
    path = tmp_path / "a.fits"
    flags = np.array([True, False, True] * 30)
    fits.BinTableHDU.from_columns([fits.Column("flag", "L", array=flags)], name="FLAGS").writeto(path)
    stored = path.read_bytes()
    assert {tuple(warned) for _, warned in pool.run(_flags, str(path))} == {()}
    path.write_bytes(stored.replace(b"TFTTFT", b"TFT\0FT", 1))  # of the first rank
    outcomes = pool.run(_flags, str(path))
    assert all(found == [*flags[:3].tolist(), False, *flags[4:].tolist()] for found, _ in outcomes)
    assert [len(warned) for _, warned in outcomes] == [1] + [0] * (len(outcomes) - 1)
    assert "'flag' has undefined values (NUL), which are read as False" in outcomes[0][1][0]


def test_lists_of_logicals_by_former_versions_of_astropy(tmp_path: Path) -> None:
    """Up to 7.2.0 it wrote 1 and 0, where the format has T and F."""
    lists = np.array([[True, False, True], [False], []], object)
    for number, letters in enumerate((b"TF", b"\1\0")):
        path = tmp_path / f"{number}.fits"
        column = fits.Column("flag", "PB()", array=np.array([np.array(a, "u1") for a in lists], object))
        fits.BinTableHDU.from_columns([column], name="FLAGS").writeto(path)
        stored = path.read_bytes().replace(b"PB(3)", b"PL(3)")
        heap = bytes([1, 0, 1, 0])
        assert stored.count(heap) >= 1
        begin = stored.rindex(heap)
        path.write_bytes(stored[:begin] + heap.translate(bytes.maketrans(b"\1\0", letters)) + stored[begin + 4 :])
        found = md.open_dataset(path).load()["flag"]
        assert [row.tolist() for row in found] == [[True, False, True], [False], []]


def test_spectra_one_a_file(pool: Pool, tmp_path: Path) -> None:
    spectra = [RNG.normal(size=20).astype("f4") for _ in range(5)]
    for number, spectrum in enumerate(spectra):
        fits.PrimaryHDU(spectrum).writeto(tmp_path / f"{number}.fits")
    check_samples(pool, str(tmp_path / "*.fits"), {"data": spectra}, {"data": (20,)})
    assert len(md.open_dataset(tmp_path / "0.fits", sample_axis=0)) == 20
    fits.PrimaryHDU(spectra[0][:7]).writeto(tmp_path / "9.fits")
    check_samples(
        pool, str(tmp_path / "*.fits"), {"data": [*spectra, spectra[0][:7]]}, {"data": (None,)}, sample="file"
    )


@pytest.mark.parametrize("first", ["image", "cube", "table"])
def test_what_is_behind_the_first_data_is_told(tmp_path: Path, first: str) -> None:
    begin = {"image": fits.ImageHDU(np.zeros((3, 4))), "cube": fits.ImageHDU(np.zeros((2, 3, 4))), "table": _table(5)}
    begin[first].name = "FIRST"
    path = tmp_path / "a.fits"
    fits.HDUList([fits.PrimaryHDU(), begin[first], _table(9), fits.ImageHDU(np.ones((3, 4)))]).writeto(path)
    with pytest.warns(UserWarning, match=r"\('FIRST', 'EVENTS', 3\) the first alone are read: hdu='EVENTS' reads all"):
        assert len(md.open_dataset(path)) == {"image": 1, "cube": 2, "table": 5}[first]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(md.open_dataset(path, hdu="EVENTS")) == 9


def test_tiles_of_a_shuffled_cube_are_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cube = RNG.integers(0, 999, (64, 8, 8)).astype("i2")
    path, opened, decoded = tmp_path / "cube.fits", [0], [0]
    image = fits.CompImageHDU(cube, compression_type="RICE_1", tile_shape=(4, 8, 8), name="CUBE")
    fits.HDUList([fits.PrimaryHDU(), image]).writeto(path)
    data = md.open_dataset(path, inputs="CUBE")
    before, section = fits.open, fits.hdu.compressed.section.CompImageSection.__getitem__

    def counted(*given: Any, **options: Any) -> Any:
        opened[0] += 1
        return before(*given, **options)

    def taken(self: Any, index: Any) -> Any:
        decoded[0] += 1
        return section(self, index)

    monkeypatch.setattr(fits, "open", counted)
    monkeypatch.setattr(fits.hdu.compressed.section.CompImageSection, "__getitem__", taken)
    batches = list(data.batches(8, shuffle=True, seed=1))
    rows = np.concatenate(batches)
    assert sorted(row.tobytes() for row in rows) == sorted(plane.tobytes() for plane in cube)
    assert opened[0] == 1
    assert decoded[0] <= 64 // 4 * 1.5
