"""Train examples/digits.py on two ranks and then on one, compare the two, and draw a picture."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import h5py
import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray

mpl.use("Agg")  # no screen is needed
from matplotlib import pyplot as plt
from matplotlib.figure import SubFigure

ROOT = Path(__file__).resolve().parent.parent
LOWEST_ACCURACY = 0.95
LARGEST_DIFFERENCE = 1e-4
TIME_LIMIT = 600.0
"""Seconds that one training may take."""
TALK_OF_TENSORFLOW = ("WARNING: All log messages before absl", "I0000 ")
"""How lines begin that TensorFlow prints on every import without a GPU, whatever its log level."""

Result = dict[str, NDArray[np.generic]]


def run(ranks: int, out: Path) -> Result:
    """Train on that many ranks; one rank is a plain Python process."""
    path = out / f"ranks-{ranks}.npz"
    mpiexec = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or "mpiexec"
    launcher = [mpiexec, "-n", str(ranks)] if ranks > 1 else []
    command = [*launcher, sys.executable, str(ROOT / "examples" / "digits.py"), "--result", str(path)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        limit = threading.Timer(TIME_LIMIT, process.terminate)
        limit.start()
        for line in process.stderr or ():
            if not line.startswith(TALK_OF_TENSORFLOW):
                print(line, end="", file=sys.stderr, flush=True)
        limit.cancel()
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}")
    with np.load(path) as arrays:
        return dict(arrays)


def weight_difference(one: Result, other: Result) -> float:
    """Largest difference of two runs' weights, each relative to the largest weight of its own array."""
    names = [name for name in one if name.startswith("weights/")]
    return max(float(np.max(np.abs(one[name] - other[name])) / np.max(np.abs(one[name]))) for name in names)


def report(two: Result, one: Result) -> bool:
    """Print what the two runs have shown; whether it is good enough."""
    stored = stored_bytes()
    difference = weight_difference(one, two)
    accuracy, alone = float(two["accuracy"]), float(one["accuracy"])
    rows = [
        ("held-out accuracy", f"{accuracy:.4f}", f"one process: {alone:.4f}; at least {LOWEST_ACCURACY} expected"),
        ("samples per second", f"{speed(two):,.0f}", f"both ranks together; one process: {speed(one):,.0f}"),
    ]
    for rank, epochs in enumerate(two["bytes_read"]):
        each = float(np.mean(epochs))
        share = f"an epoch; {each / stored:.0%} of the {stored:,} that the samples take in the files"
        rows.append((f"bytes read by rank {rank}", f"{each:,.0f}", share))
    rows.append(("difference of the weights", f"{difference:.0e}", f"relative; below {LARGEST_DIFFERENCE:g} expected"))
    print("\nTwo ranks, compared with one process on the same global batches")
    for name, value, note in rows:
        print(f"  {name:<26}{value:>8}   ({note})")
    return accuracy >= LOWEST_ACCURACY and difference <= LARGEST_DIFFERENCE


def stored_bytes() -> int:
    """Return the compressed bytes of the samples, without the metadata of the files."""
    total = 0
    for path in sorted((ROOT / "sample_data" / "digits").glob("*.h5")):
        with h5py.File(path) as file:
            total += sum(file[name].id.get_storage_size() for name in ("image", "label"))
    return total


def speed(result: Result) -> float:
    """Samples per second of the training passes; the first one also compiles the graph."""
    return float(np.median(result["samples_per_second"][1:]))


def draw(two: Result, one: Result, path: Path) -> None:
    """Loss and accuracy by epoch, and held-out digits with what the network takes them for."""
    figure = plt.figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.25))
    _draw_curves(left, two, one)
    _draw_digits(right, two)
    figure.savefig(path, dpi=120)


def _draw_curves(figure: SubFigure, two: Result, one: Result) -> None:
    loss, accuracy = figure.subplots(2, 1, sharex=True)
    epochs = np.arange(1, len(two["history/loss"]) + 1)
    for axes, name in ((loss, "loss"), (accuracy, "accuracy")):
        axes.plot(epochs, two[f"history/{name}"], label="training, 2 ranks")
        axes.plot(epochs, one[f"history/{name}"], "k:", label="training, 1 process")
        axes.plot(epochs, two[f"history/val_{name}"], label="held out, 2 ranks")
        axes.set_ylabel(name)
    loss.set_yscale("log")
    loss.legend(fontsize="small")
    accuracy.set_ylim(0.8, 1.005)
    accuracy.set_xlabel("epoch")


def _draw_digits(figure: SubFigure, result: Result) -> None:
    wrong = np.flatnonzero(result["guess"] != result["label"])
    right = np.flatnonzero(result["guess"] == result["label"])
    shown = np.concatenate([wrong, right])[:40]
    figure.suptitle(f"held-out digits and answers: all {len(wrong)} mistakes of {len(result['label'])} in red")
    for axes, number in zip(figure.subplots(5, 8).flat, shown, strict=False):
        axes.imshow(result["image"][number, :, :, 0], cmap="gray_r")
        good = result["guess"][number] == result["label"][number]
        axes.set_title(str(result["guess"][number]), color="black" if good else "red", fontsize="small", pad=2)
        axes.axis("off")


def main() -> int:
    """Run both, report, draw; 0 if the result is as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "demo_output", help="default: %(default)s")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    print("-- on two ranks", flush=True)
    two = run(2, out)
    print("\n-- in one process, for comparison", flush=True)
    one = run(1, out)
    good = report(two, one)
    draw(two, one, out / "digits.png")
    print(f"  a picture of it: {os.path.relpath(out / 'digits.png')}")
    if not good:
        print("This is not as it should be.", file=sys.stderr)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
