"""Conformance suite for HDF5."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np

from tests.support.format_suite import Case, FormatSuite


def _files(folder: Path, **checks: bool) -> list[Path]:
    paths = []
    rng = np.random.default_rng(0)
    first = 0
    for number, rows in enumerate((150, 37, 1, 110)):
        paths.append(folder / f"part{number}.h5")
        with h5py.File(paths[-1], "w") as file:
            chunks = (min(8, rows), 5, 3)
            image = rng.normal(size=(rows, 5, 4)).astype("f4")
            file.create_dataset("image", data=image, chunks=chunks, compression="gzip", shuffle=True, **checks)
            file["run/energy"] = rng.normal(size=rows).astype(">f8")
            file["id"] = np.arange(first, first + rows)
        first += rows
    return paths


class TestHdf5(FormatSuite):
    def write(self, folder: Path) -> Case:
        names = ("image", "run/energy", "id")
        read: dict[str, list[np.ndarray]] = {name: [] for name in names}
        for path in _files(folder):
            with h5py.File(path) as file:
                for name in names:
                    read[name].append(file[name][:])
        return Case(str(folder / "*.h5"), {name: np.concatenate(arrays) for name, arrays in read.items()}, "id")

    def damage(self, folder: Path) -> Case:
        path = _files(folder, fletcher32=True)[0]
        with h5py.File(path) as file:
            chunk = file["image"].id.get_chunk_info(3)
        content = bytearray(path.read_bytes())
        content[chunk.byte_offset + chunk.size // 2] ^= 0x10
        path.write_bytes(content)
        return Case(str(folder / "*.h5"), {}, "id")
