"""Systems that lack what Linux alone has, such as macOS: calls of ``os``, files in ``/proc``, and ``/dev/shm``."""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import matex_data as md
from matex_data import machine
from matex_data.doctor import limits, storage
from matex_data.io import modes, preadv, probe
from matex_data.mpi import addresses
from matex_data.mpi.library import MPI

CALLS = ("sched_getaffinity", "posix_fadvise", "POSIX_FADV_DONTNEED", "process_cpu_count")
FOLDERS = ("/proc", "/sys/fs", "/dev/shm")


@pytest.fixture(autouse=True)
def _without_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CALLS:
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(preadv, "_NOWAIT", None)

    def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **options: Any) -> Any:
            if isinstance(path, str | Path) and str(path).startswith(FOLDERS):
                raise FileNotFoundError(2, "No such file or directory", str(path))
            return function(path, *args, **options)

        return call

    for module, names in ((os, ("stat", "listdir", "readlink", "statvfs")), (io, ("open",)), (builtins, ("open",))):
        for name in names:
            monkeypatch.setattr(module, name, guarded(getattr(module, name)))


def test_cores_memory_and_names_of_a_machine() -> None:
    assert machine.cores() == os.cpu_count()
    assert machine.free_memory() > 0
    assert modes.mount_table() == "" and modes.mount_of(".") is None
    assert probe._boot.__wrapped__() == ""
    assert addresses.machine() and "127.0.0.1" in addresses.addresses()


@pytest.mark.parametrize("stored", ({"chunks": (10, 3), "compression": "gzip"}, {}))
@pytest.mark.parametrize("shuffle", (False, True, "global"))
def test_batches(tmp_path: Path, stored: dict[str, Any], shuffle: Any) -> None:
    values = np.arange(300.0).reshape(100, 3)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=values, **stored)
    data = md.open_dataset(str(tmp_path / "a.h5"), inputs="x", comm=MPI.COMM_SELF)
    found = np.concatenate(list(data.batches(20, shuffle=shuffle, seed=1)))
    np.testing.assert_array_equal(found[np.argsort(found[:, 0])], values)


def test_doctor(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(1 << 20))
    assert storage.examine(str(tmp_path / "data"), None) is not None
    assert limits.examine() is not None
