"""Run scripts one after the other in one program: importing TensorFlow costs more than a small script.

Python runs this program for the expected values, the launcher of ``matex run`` for those of the ranks.
Its arguments: a folder for the outputs, and the scripts.

In the folder of a script: ``stdout`` (of rank 0), ``stderr.<rank>``, ``x.weights.h5`` or ``x.weights.h5.npz`` where
the script saves, ``variables.<rank>.npz`` with the variables that its global names hold, ``done.<rank>`` or
``error.<rank>``. After an error on several ranks the job ends, as it does under ``matex run``.
"""

from __future__ import annotations

import contextlib
import gc
import os
import runpy
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf


def main() -> None:
    """Run the scripts on the command line."""
    folder, *scripts = (Path(argument).resolve() for argument in sys.argv[1:])
    rank = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
    path = list(sys.path)
    for script in scripts:
        run(script, folder / script.parent.name / script.stem, rank)
        sys.path[:] = path


def run(script: Path, folder: Path, rank: int) -> None:
    """Run one script in a folder of its own; raise its error again unless the program is a plain one."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    keras.backend.clear_session()
    gc.collect()
    sys.argv = [str(script), str(folder / "x.weights.h5")]
    sys.path.insert(0, str(script.parent))
    begin = time.perf_counter()
    try:
        with captured(folder, rank):
            names = runpy.run_path(str(script), run_name="__main__")
        np.savez(folder / f"variables.{rank}.npz", **variables(names))
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            (folder / f"error.{rank}").write_text(traceback.format_exc())
            if os.environ.get("MATEX_DRIVER_PLAIN"):
                return
            raise
    finally:
        keras.config.set_dtype_policy("float32")
    (folder / f"done.{rank}").write_text(f"{time.perf_counter() - begin:.2f}")


@contextlib.contextmanager
def captured(folder: Path, rank: int) -> Iterator[None]:
    """Context manager: redirect the output to files."""
    sys.stderr.flush()
    stderr = os.dup(2)
    printed = folder / "stdout" if rank == 0 else Path(os.devnull)  # ranks of a loop over whole batches do not meet
    with (folder / f"stderr.{rank}").open("wb") as errors, printed.open("w") as output:
        os.dup2(errors.fileno(), 2)
        try:
            with contextlib.redirect_stdout(output) if rank == 0 else contextlib.nullcontext():
                yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)


def variables(names: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of models and layers in the global names, and plain variables; not those of a session."""
    found: dict[str, Any] = {}
    for name, value in names.items():
        if isinstance(value, keras.Model):
            selected = value.weights
        elif isinstance(value, keras.layers.Layer):
            selected = [*value.trainable_variables, *value.non_trainable_variables]
        elif isinstance(value, tf.Variable | keras.Variable) and not hasattr(value, "graph"):
            selected = [value]
        else:
            continue
        seeds = [getattr(v, "path", "") for v in selected]
        found |= {
            f"{name}/{i}": np.asarray(v)
            for i, (v, path) in enumerate(zip(selected, seeds, strict=True))
            if "seed_generator" not in path and v.dtype != "string"
        }
    return found


if __name__ == "__main__":
    main()
