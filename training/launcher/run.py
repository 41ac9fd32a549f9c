"""``matex run script.py``: a script that knows nothing of ranks trains on all of them."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import runpy
import sys
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matex_data.io.sessions import read_sessions
from matex_data.mpi import abort
from matex_data.mpi.abort import exit_with, replace_exit, run_exit_handlers_first
from matex_data.training.comm.world import comm_or_world


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line of ``matex run``: its own options, the script, and the script's options. *Collective*."""
    parser = argparse.ArgumentParser("matex run", description=__doc__)
    parser.add_argument("--strategy", choices=("chained", "funneled", "concurrent"), default="chained")
    parser.add_argument("--sync-batch-norm", action="store_true", help="normalize by the whole global batch")
    parser.add_argument("--no-verify", dest="verify", action="store_false", help="leave the self-check of fit out")
    parser.add_argument("--all-output", action="store_true", help="let every rank print, not rank 0 alone")
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    given = vars(parser.parse_args(arguments))
    run(given.pop("script"), given.pop("arguments"), **given)


def run(
    script: Path,
    arguments: Sequence[str] = (),
    *,
    strategy: Any = "chained",
    sync_batch_norm: bool = False,
    verify: bool = True,
    all_output: bool = False,
) -> None:
    """Run a script as ``python script.py`` would, on all ranks together. *Collective*. Does not return on errors.

    Parameters
    ----------
    arguments : of the script.
    strategy : how averages are embedded in graphs: "chained", "funneled" or "concurrent".
    sync_batch_norm : normalize by the statistics of the global batch.
    verify : compare the gradient of the ranks' parts with that of the whole batch in the first step of ``fit``.
    all_output : let every rank print; otherwise rank 0 alone does, and others write errors to stderr.
    """
    comm = comm_or_world(None)
    if comm.size > 1:
        read_sessions(comm)  # from now on an error of one rank ends the job
        replace_exit()
        if comm.rank > 0 and not all_output:
            _mute()
        _patch(strategy, sync_batch_norm, verify)
        run_exit_handlers_first()
    _add_matex_data_set()
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) or end.code is None else 1
        exit_with(code or 0, "" if end.code is None or isinstance(end.code, int) else f"{end.code}")
    except BaseException:  # whatever ends a script ends the job
        abort.unmute_stderr()
        sys.excepthook(*sys.exc_info())
        exit_with(1)


def _patch(strategy: Any, sync_batch_norm: bool, verify: bool) -> None:
    """Patch Keras and TensorFlow, and let all ranks draw the same random numbers. *Collective*."""
    from matex_data.training import keras_api
    from matex_data.training.comm.channel import open_channel
    from matex_data.training.launcher.keras_patches import KerasPatches
    from matex_data.training.launcher.loops import LoopPatches
    from matex_data.training.launcher.saving import patch_saving
    from matex_data.training.launcher.tf1 import SessionPatches
    from matex_data.training.launcher.tf_distribute import patch_strategies
    from matex_data.training.reduction.ops import Reducer
    from matex_data.training.sharding.determinism import seed_all_ranks

    _check_backend()
    channel = open_channel(None)
    keras_api.check(channel.rank)
    seed_all_ranks(channel)
    reducer = Reducer(channel, strategy)
    KerasPatches(channel, reducer, sync_batch_norm, verify)
    SessionPatches(channel, LoopPatches(channel, reducer))
    patch_saving(channel)
    patch_strategies(channel)


def _check_backend() -> None:
    import keras

    if keras.backend.backend() != "tensorflow":
        raise SystemExit(
            f"matex run trains Keras models of the backend tensorflow, not {keras.backend.backend()}\n"
            "  remedy: set KERAS_BACKEND=tensorflow, or leave it out"
        )


def _add_matex_data_set() -> None:
    """Scripts for MaTEx find its ``DataSet`` in TensorFlow."""
    import tensorflow as tf

    import matex_data

    tf.DataSet = lambda *args, **kwargs: matex_data.DataSet(*args, **kwargs)


def _mute() -> None:
    """Let ranks other than 0 print nothing but errors, and what this package warns of."""
    sys.stdout.flush()
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, sys.stdout.fileno())
    os.close(silence)
    errors = abort.mute_stderr()
    warnings.simplefilter("ignore")
    faulthandler.enable(errors)
    logging.getLogger("matex_data").addHandler(logging.StreamHandler(os.fdopen(os.dup(errors), "w")))
    of_threads = threading.excepthook

    def hook(arguments: threading.ExceptHookArgs) -> None:
        with abort.stderr():
            of_threads(arguments)

    threading.excepthook = hook


if __name__ == "__main__":
    main()
