"""Compare one and two ranks on GPUs with the CPU, and measure steps, transfers and feeding: ``python -m tests.gpu``."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.launch import ROOT, mpiexec

TOLERANCE = {"cpu": 1e-4, "gpu": 2e-2}
"""Largest difference of weights from those of the CPU, in parts of the largest: a GPU rounds products to TF32."""
LIMIT = 300.0
"""Seconds for one process, or one job."""
TRANSPORTS = ("mpi", "tensorflow")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all measurements, print a line for each, and return 1 if weights are wrong, 2 where there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help="cpu: try the script without a GPU")
    parser.add_argument("--steps", type=int, default=50, help="of each measurement")
    parser.add_argument("--width", type=int, help="units of the large model's layers (4096; with --device cpu 256)")
    options = parser.parse_args(arguments)
    cpu = {"CUDA_VISIBLE_DEVICES": ""}
    devices = cpu if options.device == "cpu" else {}
    if options.device == "gpu" and not _gpus():
        print(
            "make test-gpu: TensorFlow sees no GPU here, so nothing was tested; it needs a machine with one, and "
            "pip install 'tensorflow[and-cuda]'. python -m tests.gpu --device cpu tries the script itself",
            file=sys.stderr,
        )
        return 2
    width = str(options.width or (256 if options.device == "cpu" else 4096))
    wrong = False
    with tempfile.TemporaryDirectory(prefix="matex-gpu-") as folder:
        for model in ("mlp", "cnn"):
            _job(0, cpu, "training", model, "20", "32", folder + "/expected.npz")
            expected = _weights(folder + "/expected.npz")
            for ranks, transport in ((1, "mpi"), *((2, transport) for transport in TRANSPORTS)):
                _job(ranks, devices, "training", model, "20", "32", folder + "/found.npz", transport=transport)
                error = _difference(_weights(folder + "/found.npz"), expected)
                bad = not error <= TOLERANCE[options.device]
                wrong |= bad
                _report(f"{model}, {_name(ranks, transport)}: weights differ from the CPU's by", f"{error:.1e}", bad)
        for ranks, transport in ((0, "mpi"), (1, "mpi"), *((2, transport) for transport in TRANSPORTS)):
            found = _job(ranks, devices, "training", "mlp", str(options.steps), width, transport=transport)
            _report(f"mlp of width {width}, {_name(ranks, transport)}", found)
        for measurement in ("transfers", "feeding"):
            for line in _job(0, devices, measurement, folder, str(options.steps)).splitlines():
                _report(measurement, line)
    return int(wrong)


def _gpus() -> int:
    """Return the number of GPUs that TensorFlow sees, in a process that does not keep their memory."""
    code = "import tensorflow as tf; print('GPUS', len(tf.config.list_physical_devices('GPU')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT, check=False)
    found = re.search(r"GPUS (\d+)", done.stdout)
    return int(found[1]) if found else 0


def _job(ranks: int, environment: dict[str, str], name: str, *arguments: str, transport: str = "mpi") -> str:
    """Run a module of this package, and return what it prints behind RESULT.

    Parameters
    ----------
    ranks : of ``matex run``; 0: plain Python.
    environment : variables of the processes.

    Raises
    ------
    SystemExit : it fails, or takes longer than ``LIMIT``.
    """
    module = ["-m", f"tests.gpu.{name}", *arguments]
    launched = [mpiexec(), "-n", str(ranks), sys.executable, "-m", "matex_data", "run", "--collectives", transport]
    command = [*launched, *module] if ranks else [sys.executable, *module]
    options: dict[str, Any] = {"env": {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, **environment}, "cwd": ROOT}
    try:
        done = subprocess.run(command, **options, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"FAILED: {' '.join(command)} took longer than {LIMIT:g} s") from None
    if done.returncode:
        raise SystemExit(f"FAILED with exit code {done.returncode}: {' '.join(command)}\n{done.stderr[-4000:]}")
    return "\n".join(line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT "))


def _weights(path: str) -> list[np.ndarray]:
    with np.load(path) as arrays:
        weights = [arrays[name] for name in arrays.files]
    Path(path).unlink()
    return weights


def _difference(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(found, expected, strict=True))


def _name(ranks: int, transport: str) -> str:
    return "plain Keras" if ranks == 0 else f"{ranks} ranks, {transport}" if ranks > 1 else "1 rank"


def _report(name: str, value: str, bad: bool = False) -> None:
    print(f"{'WRONG ' if bad else ''}{name}: {value}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
