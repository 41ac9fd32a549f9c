"""Training of the example of a forecast on monthly files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from mpi4py import MPI

from sample_data.make import write_weather
from tests.support.ranks import Pools


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weather")
    write_weather(folder)
    return folder


def _train(comm: MPI.Intracomm, folder: str, **options: Any) -> dict[str, Any]:
    import keras

    from examples.weather import train

    keras.backend.clear_session()
    return train(folder, **options)


@pytest.mark.slow  # an example as a whole
def test_the_forecast_is_better_than_persistence(folder: Path, ranks: Pools, tmp_path: Path) -> None:
    picture = tmp_path / "weather.png"
    (found,) = ranks(1).run(_train, str(folder), epochs=3, picture=str(picture), timeout=120)
    forecast, persistence = found["errors"]
    with xr.open_dataset(folder / "2011-06.nc") as june:
        test = june.z.sel(level=500).to_numpy()
    assert persistence == pytest.approx(np.sqrt(np.mean((test[13:] - test[1:-12]) ** 2)), rel=1e-5)
    assert forecast < persistence / 4 and picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_two_ranks_train_as_one_process(folder: Path, ranks: Pools) -> None:
    (alone,) = ranks(1).run(_train, str(folder), epochs=1, timeout=240)
    for found in ranks(2).run(_train, str(folder), epochs=1, timeout=240):
        largest = np.abs(alone["weights"]).max()
        np.testing.assert_allclose(found["weights"], alone["weights"], rtol=0, atol=1e-4 * largest)
        np.testing.assert_allclose(found["errors"], alone["errors"], rtol=1e-3)
