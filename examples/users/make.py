"""Write made data for the scripts of this folder, by the libraries of their users.

python examples/users/make.py churn FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

RNG = np.random.default_rng(1)


def lcls(folder: Path) -> None:
    """Write runs of small data as psana does, with h5py; the gas detector was off in one of them."""
    import h5py

    for run in (3, 4, 5):
        hit = RNG.random(200) < 0.5
        spot = np.exp(-0.1 * ((np.indices((16, 16)) - 7.5) ** 2).sum(axis=0))
        with h5py.File(folder / f"run{run:04d}.h5", "w") as file:
            file["event_time"] = (1_690_000_000 + run) * 10**9 + np.arange(200, dtype="u8")
            file["jungfrau/calib"] = (RNG.normal(size=(200, 16, 16)) + 3 * hit[:, None, None] * spot).astype("f4")
            file["ebeam/photonEnergy"] = RNG.normal(9500, 30, 200)
            file["hit"] = hit.astype("i4")
            if run != 4:
                file["gmd/energy"] = RNG.gamma(4, 0.5, 200)


def era5(folder: Path) -> None:
    """Write a year of 6-hourly temperatures, a file a month, with xarray."""
    import pandas as pd
    import xarray as xr

    times, latitude = pd.date_range("2019-01-01", "2019-12-31 18:00", freq="6h"), np.linspace(60, 40, 5)
    steps, noise = np.arange(len(times))[:, None, None], RNG.normal(0, 0.5, (len(times), 5, 8))
    wave = 6 * np.sin(2 * np.pi * (np.arange(8) / 8 - steps / 37))  # which travels to the east
    value = 280 + 8 * np.cos(2 * np.pi * steps / 1460) + 5 * np.cos(np.pi * steps / 2) + wave + noise
    coordinates = {"time": times, "latitude": latitude, "longitude": np.arange(0, 40, 5.0)}
    year = xr.DataArray(value.astype("f4"), coordinates, attrs={"units": "K"}).to_dataset(name="t2m")
    for month, part in year.groupby("time.month"):
        part.to_netcdf(folder / f"t2m_2019{month:02d}.nc")


def atoms(folder: Path) -> None:
    """Write clusters of 3 to 5 copper atoms with energies of effective medium theory, with ASE."""
    from ase import Atoms
    from ase.calculators.emt import EMT
    from ase.io import write

    frames = []
    for number in range(600):
        count = 3 + number % 3
        grid = np.array([[0, 0, 0], [2.4, 0, 0], [0, 2.4, 0], [0, 0, 2.4], [2.4, 2.4, 0]])[:count]
        frames.append(Atoms("Cu" * count, grid + RNG.normal(0, 0.15, (count, 3)), calculator=EMT()))
        frames[-1].get_potential_energy()
    write(folder / "clusters.extxyz", frames)


def microscopy(folder: Path) -> None:
    """Write fields of view with cells, and masks, with tifffile."""
    import tifffile

    for kind in ("image", "mask"):
        (folder / kind).mkdir()
    for number in range(6):
        rows, columns = np.indices((192, 192))
        centres = RNG.uniform(0, 192, (30, 2))
        mask = np.any([(rows - y) ** 2 + (columns - x) ** 2 < 64 for y, x in centres], axis=0)
        tifffile.imwrite(folder / "image" / f"{number}.tif", RNG.poisson(100 + 80 * mask).astype("u2"))
        tifffile.imwrite(folder / "mask" / f"{number}.tif", mask.astype("u1"))


def churn(folder: Path) -> None:
    """Write a table of customers with texts and missing values, with pandas."""
    import pandas as pd

    table = pd.DataFrame({"customer": [f"C{number:05d}" for number in range(1500)]})
    table["contract"] = RNG.choice(["monthly", "yearly", "two years"], 1500, p=[0.6, 0.25, 0.15])
    table["tenure"] = RNG.integers(0, 72, 1500)
    table["charges"] = RNG.normal(65, 20, 1500).round(2)
    logit = 1.5 * (table.contract == "monthly") - 0.06 * table.tenure + 0.02 * table.charges
    table["churn"] = np.where(RNG.random(1500) < 1 / (1 + np.exp(-logit)), "Yes", "No")
    table.loc[RNG.random(1500) < 0.05, "charges"] = np.nan
    table.to_csv(folder / "customers.csv", index=False)


def nanoaod(folder: Path) -> None:
    """Write events of signal and background with jets, in the form of NanoAOD, with uproot."""
    import awkward as ak
    import uproot

    for name, scale in (("signal", 90), ("background", 45)):
        counts = RNG.poisson(4, 1500)
        with uproot.recreate(folder / f"{name}.root") as file:
            types = {"event": "uint64", "Jet_pt": "var * float32", "MET_pt": "float32", "genWeight": "float32"}
            file.mktree("Events", types).extend(
                {
                    "event": np.arange(1500, dtype="u8"),
                    "Jet_pt": ak.unflatten(RNG.exponential(scale, counts.sum()).astype("f4") + 15, counts),
                    "MET_pt": RNG.exponential(scale, 1500).astype("f4"),
                    "genWeight": RNG.choice([1.0, -1.0], 1500, p=[0.9, 0.1]).astype("f4"),
                }
            )


def photos(folder: Path) -> None:
    """Write photographs of bright skies and of dark woods, a folder for each class, with Pillow."""
    from PIL import Image

    for name, colour in (("sky", (110, 160, 230)), ("wood", (60, 110, 50))):
        (folder / name).mkdir()
        for number in range(60):
            pixels = np.clip(RNG.normal(colour, 60, (48, 64, 3)), 0, 255).astype("u1")
            Image.fromarray(pixels).save(folder / name / f"IMG_{number:04d}.jpg")


MAKERS: dict[str, Callable[[Path], None]] = {
    function.__name__: function for function in (lcls, era5, atoms, microscopy, churn, nanoaod, photos)
}

if __name__ == "__main__":
    MAKERS[sys.argv[1]](Path(sys.argv[2]))
