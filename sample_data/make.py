"""Write small data sets for the examples, the same each time: digits, jets, photographs, cells, weather and more.

The digits are 1,797 of the "Optical Recognition of Handwritten Digits" of the UCI repository (E. Alpaydin, C. Kaynak,
1998, https://doi.org/10.24432/C50P49, CC BY 4.0) and lie beside this script. The photographs of a temple and a flower
come with scikit-learn. The jets are drawn from a toy model of particles in one core, or in the two cores of a heavy
particle's decay. The cells are bright ellipses in noise, and the weather consists of waves that travel eastwards.
Collisions are events with jets, and the passengers of a ship are a table; both are drawn from simple distributions.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray
from PIL import Image

HERE = Path(__file__).resolve().parent
LENGTHS = (700, 461, 333, 303)
"""Samples of each file: unequal, and no multiple of a chunk, as files of experiments are."""
CHUNK_ROWS = 16
JETS = (400, 277, 0, 251)
"""Jets of each file; one file has none."""
HEAVY = 80.0
"""Mass of the particle that decays to two cores, in GeV."""
JET = np.dtype([("pt", "<f4"), ("eta", "<f4"), ("mass", "<f4"), ("constituents", "<i4")])
"""Row of the table of jets: transverse momentum in GeV, pseudorapidity, mass in GeV, number of particles."""
TILE, TILE_STRIDE = 64, 32
"""Edge of a tile of a photograph, and distance between the corners of two tiles, in pixels."""
CELLS, CELL_IMAGE = 96, 64
"""Images of cells, and the edge of one, in pixels."""


def write_digits(out: Path) -> list[Path]:
    """Files ``digits-0.h5``, ... with ``image`` (uint8, 8 x 8 x 1, 0 to 16) and ``label`` (int64), in gzip chunks."""
    with np.load(HERE / "digits.npz") as digits:
        image, label = digits["image"], digits["label"]
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    first = 0
    for number, length in enumerate(LENGTHS):
        paths.append(out / f"digits-{number}.h5")
        with h5py.File(paths[-1], "w") as file:
            _write(file, "image", image[first : first + length])
            _write(file, "label", label[first : first + length])
            file["image"].attrs["description"] = "handwritten digit, 0 is paper and 16 is ink"
        first += length
    return paths


def write_jets(out: Path) -> list[Path]:
    """Files ``jets-0.h5``, ... with the particles of each jet, a table of jets, labels and weights.

    ``constituent_pt`` (GeV), ``constituent_eta`` and ``constituent_phi`` (relative to the jet) are float32 of variable
    length; ``jets`` is a compound table; ``label`` (int64) is 1 for two cores; ``weight`` (float32) may be negative.
    """
    rng = np.random.default_rng(1)
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"jets-{number}.h5" for number in range(len(JETS))]
    for path, count in zip(paths, JETS, strict=True):
        label = rng.integers(0, 2, count)
        weight = rng.choice([1.0, 1.0, 1.0, 0.5, -0.25], count).astype("<f4")
        particles = [_particles(rng, bool(two_cores)) for two_cores in label]
        table = np.array([_row(rng, *jet) for jet in particles], JET)
        with h5py.File(path, "w") as file:
            for axis, name in enumerate(("constituent_pt", "constituent_eta", "constituent_phi")):
                _write_ragged(file, name, [jet[axis] for jet in particles])
            for name, values in (("jets", table), ("label", label), ("weight", weight)):
                file.create_dataset(name, data=values, track_times=False)
    return paths


def _particles(rng: np.random.Generator, two_cores: bool) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return transverse momenta in GeV, and positions in eta and phi relative to the jet, of 3 to some 40 particles."""
    count = 3 + rng.poisson(14 if two_cores else 11)
    pt = rng.exponential(1.0, count) ** 1.5
    pt *= rng.uniform(250, 400) / pt.sum()
    eta, phi = rng.normal(0, 0.08, (2, count))
    if two_cores:
        angle, share = rng.uniform(0, 2 * np.pi), rng.uniform(0.3, 0.7)
        distance = HEAVY / (pt.sum() * np.sqrt(share * (1 - share)))
        core = np.where(rng.random(count) < share, 1 - share, -share) * distance
        eta, phi = eta + core * np.cos(angle), phi + core * np.sin(angle)
    return pt.astype("<f4"), eta.astype("<f4"), phi.astype("<f4")


def _row(rng: np.random.Generator, pt: NDArray[Any], eta: NDArray[Any], phi: NDArray[Any]) -> tuple[float, ...]:
    """Return the row of ``JET`` for massless particles near the axis of the jet."""
    deta, dphi = eta[:, None] - eta, phi[:, None] - phi
    mass_squared = (pt[:, None] * pt * (np.cosh(deta) - np.cos(dphi))).sum()
    return pt.sum(), rng.normal(0, 1), np.sqrt(mass_squared), len(pt)


def write_photos(out: Path) -> list[Path]:
    """Folders ``flower`` and ``temple`` with JPEG tiles, 64 x 64 pixels, of two photographs."""
    from sklearn.datasets import load_sample_images  # the other data sets do without it

    photos = dict(zip(("temple", "flower"), load_sample_images().images, strict=True))
    paths = []
    for name, photo in sorted(photos.items()):
        (out / name).mkdir(parents=True, exist_ok=True)
        corners = [range(0, length - TILE + 1, TILE_STRIDE) for length in photo.shape[:2]]
        for number, (top, left) in enumerate((top, left) for top in corners[0] for left in corners[1]):
            paths.append(out / name / f"{name}-{number}.jpg")
            Image.fromarray(photo[top : top + TILE, left : left + TILE]).save(paths[-1], quality=90)
    return paths


def write_cells(out: Path) -> list[Path]:
    """Folders ``images`` (16-bit gray PNG) and ``masks`` (8-bit PNG: 1 is a cell) with files of equal names."""
    rng = np.random.default_rng(2)
    paths = []
    for folder in ("images", "masks"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    y, x = np.mgrid[:CELL_IMAGE, :CELL_IMAGE]
    for number in range(CELLS):
        mask = np.zeros((CELL_IMAGE, CELL_IMAGE), bool)
        for _ in range(rng.integers(2, 6)):
            (row, column), (height, width) = rng.uniform(0, CELL_IMAGE, 2), rng.uniform(4, 10, 2)
            mask |= ((y - row) / height) ** 2 + ((x - column) / width) ** 2 < 1
        light = 2000 + 1500 * mask + rng.normal(0, 600, mask.shape)
        for folder, pixels in (("images", light.clip(0, 65535).astype(np.uint16)), ("masks", mask.astype(np.uint8))):
            paths.append(out / folder / f"cells-{number}.png")
            Image.fromarray(pixels).save(paths[-1])
    return paths


def write_weather(out: Path) -> list[Path]:
    """Files ``2010-01.nc``, ...: a month of six-hourly heights ``z`` of three levels, and the static ``terrain``, in m.

    Each of four waves around the globe has a speed of its own; a mountain bends the flow; noise is added.
    """
    import pandas as pd  # the other data sets do without these
    import xarray as xr

    rng, times = np.random.default_rng(3), pd.date_range("2010-01-01", "2011-06-30T18", freq="6h")
    lat, lon, levels = np.linspace(30, 65, 8), np.arange(0, 360, 22.5), [250, 500, 850]  # hPa
    terrain = 1500 * np.exp(-(((lat[:, None] - 45) / 9) ** 2) - ((lon - 110) / 30) ** 2)
    days, shape = np.arange(len(times))[:, None, None] / 4, np.exp(-(((lat - 48) / 14) ** 2))[:, None]
    mean = np.array([10400, 5500, 1450])[:, None, None] - np.array([14, 8, 0])[:, None, None] * (lat[:, None] - 48)
    z = mean + np.array([0.06, 0.05, 0.02])[:, None, None] * terrain + rng.normal(0, 4, (len(times), 3, 8, 16))
    for waves, speed in ((3, 9.0), (4, 12.0), (5, 14.0), (6, 16.0)):  # degrees of longitude a day
        phase = waves * np.deg2rad(lon - speed * days) + rng.uniform(0, 6)
        for level, (height, lag) in enumerate(((80, -0.2), (60, 0.0), (30, 0.5))):
            z[:, level] += height * shape * np.sin(phase - lag)
    axes = ("time", "level", "lat", "lon")
    fields = {"z": (axes, z.astype("f4")), "terrain": (axes[2:], terrain.astype("f4"))}
    series = xr.Dataset(fields, coords={"time": times, "level": levels, "lat": lat, "lon": lon})
    out.mkdir(parents=True, exist_ok=True)
    months = np.unique(times.strftime("%Y-%m"))
    for month in months:
        series.sel(time=month).to_netcdf(out / f"{month}.nc", unlimited_dims="time")
    return [out / f"{month}.nc" for month in months]


def write_collisions(out: Path) -> list[Path]:
    """Files ``signal.root``, ``background_soft.root`` and ``background_hard.root`` with a tree ``Events``.

    Each event has the transverse momenta ``Jet_pt`` of its jets, what is missing, ``MET_pt`` (float32, GeV), and the
    generator's weight ``genWeight``, which is 1 at the mean.
    """
    import awkward as ak  # the other data sets do without these
    import uproot

    rng = np.random.default_rng(4)
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, events, jets, hardness, missing in (
        ("signal", 900, 3.5, 55.0, 60.0),
        ("background_soft", 1400, 2.0, 25.0, 15.0),
        ("background_hard", 1000, 2.5, 45.0, 20.0),
    ):
        counts = 1 + rng.poisson(jets, events)
        columns = {
            "Jet_pt": ak.unflatten((15 + rng.exponential(hardness, counts.sum())).astype("f4"), counts),
            "MET_pt": rng.exponential(missing, events).astype("f4"),
            "genWeight": rng.uniform(0.5, 1.5, events).astype("f4"),
        }
        paths.append(out / f"{name}.root")
        with uproot.recreate(paths[-1]) as file:
            tree = file.mktree("Events", {key: "var * float32" if key == "Jet_pt" else "float32" for key in columns})
            for begin in range(0, events, 250):
                tree.extend({key: values[begin : begin + 250] for key, values in columns.items()})
    return paths


def write_passengers(out: Path) -> list[Path]:
    """Files ``passengers-0.csv``, ... of a ship's list: texts, numbers and texts that are missing, and who survived."""
    rng = np.random.default_rng(5)
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, rows in enumerate((400, 317, 174)):
        level, woman = rng.choice(3, rows, p=[0.25, 0.2, 0.55]), rng.random(rows) < 0.37
        age = np.maximum(1, rng.normal(38 - 6 * level, 13))
        chance = 1 / (1 + np.exp(0.4 - 2.4 * woman + 0.9 * level + 0.025 * (age - 30)))
        columns = [
            np.array(["first", "second", "third"])[level],
            np.where(woman, "female", "male"),
            np.where(rng.random(rows) < 0.2, "", np.char.mod("%.0f", age)),
            rng.choice(["Southampton", "Cherbourg", "Queenstown", ""], rows, p=[0.7, 0.19, 0.09, 0.02]),
            np.char.mod("%.2f", rng.gamma(2, np.array([40, 12, 5])[level])),
            (rng.random(rows) < chance).astype(int).astype(str),
        ]
        paths.append(out / f"passengers-{number}.csv")
        lines = ["class,sex,age,port,fare,survived", *map(",".join, zip(*columns, strict=True))]
        paths[-1].write_text("\n".join(lines) + "\n")
    return paths


def _write_ragged(file: h5py.File, name: str, rows: list[NDArray[Any]]) -> None:
    chunks = (CHUNK_ROWS,) if rows else None
    dataset = file.create_dataset(name, (len(rows),), h5py.vlen_dtype("<f4"), chunks=chunks, track_times=False)
    for i, row in enumerate(rows):
        dataset[i] = row


def _write(file: h5py.File, name: str, values: NDArray[Any]) -> None:
    chunk = (CHUNK_ROWS, *values.shape[1:])
    # Without times the same call gives the same bytes.
    file.create_dataset(name, data=values, chunks=chunk, compression="gzip", shuffle=True, track_times=False)


WRITERS = {
    "digits": write_digits,
    "jets": write_jets,
    "photos": write_photos,
    "cells": write_cells,
    "weather": write_weather,
    "collisions": write_collisions,
    "passengers": write_passengers,
}


def main() -> None:
    """Write the files and say where they are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", nargs="?", choices=WRITERS, default="digits", help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="folder to write to (default: that name, beside this script)")
    arguments = parser.parse_args()
    paths = WRITERS[arguments.data](arguments.out or HERE / arguments.data)
    for folder in sorted({path.parent for path in paths}):
        sizes = [path.stat().st_size for path in paths if path.parent == folder]
        print(f"   {folder} ({len(sizes):,} files, {sum(sizes):,} bytes)")


if __name__ == "__main__":
    main()
