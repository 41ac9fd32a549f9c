"""``matex run script.py``, ``matex run -m module``: train a script written for one process on all ranks."""

from __future__ import annotations

import faulthandler
import functools
import importlib
import importlib.util
import logging
import os
import pkgutil
import runpy
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from matex_data.io.sessions import prepare_process, read_sessions
from matex_data.launching.start import gpus
from matex_data.machine import keep_freed_memory
from matex_data.mpi import abort
from matex_data.mpi.abort import exit_with, replace_exit, run_exit_handlers_first
from matex_data.mpi.communicator import Communicator, Equal
from matex_data.paths import count_as_script
from matex_data.training.comm.world import comm_or_world
from matex_data.training.launcher.arguments import parse
from matex_data.training.launcher.imports import after_import
from matex_data.training.restart.preemption import REQUESTS, Preempted

log = logging.getLogger("matex_data.training")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line of ``matex run`` and run the script. *Collective*."""
    run(**parse(sys.argv[1:] if arguments is None else arguments).of_run)


def run(
    script: Path | str,
    arguments: Sequence[str] = (),
    *,
    as_module: bool = False,
    strategy: Any = "chained",
    wire_dtype: Any = None,
    collectives: Any = "auto",
    sync_batch_norm: bool = False,
    verify: Any = "proven",
    model: int = 1,
    shard_optimizer: bool = False,
    all_output: bool = False,
    stages: int = 1,
    micro_batches: Any = None,
    checkpoint: Path | None = None,
    save_every: int | None = None,
) -> None:
    """Run a script like ``python script.py``, on all ranks. *Collective*. An error of the script ends the process.

    Parameters
    ----------
    script : path of the script, or name of the module.
    arguments : arguments of the script.
    as_module : run a module like ``python -m package.module``.
    model, stages : ranks over which the weights of each layer, and the layers, are cut; see ``Mesh``.
    strategy : of communication; see ``distribute``.
    wire_dtype, collectives, sync_batch_norm, verify, shard_optimizer, micro_batches, save_every : see ``fit``.
    checkpoint : folder of the checkpoints of all calls of ``fit``. A script that is started again goes on with the next
        batch. None: neither save nor resume.
    all_output : print the output of every rank; otherwise only that of rank 0, and the errors of all ranks.
    """
    prepare_process()
    keep_freed_memory()
    comm = comm_or_world(None)
    if comm.size > 1:
        read_sessions(comm)  # connects the ranks, so that an error of one rank ends the job
        replace_exit()
        if comm.rank > 0 and not all_output:
            _mute_output()
    patches: list[Callable[[], None]] = [_add_matex_data_set]
    if comm.size > 1 or checkpoint is not None:
        staged = {"stages": stages, "micro_batches": micro_batches} if stages != 1 else {}
        checkpoints = None if checkpoint is None else (checkpoint.absolute(), save_every)
        patch = _prepared(
            strategy, wire_dtype, collectives, sync_batch_norm, verify, model, shard_optimizer, staged, checkpoints
        )
        patches.insert(0, patch)
    if comm.size > 1:
        _warn_of_hashes(read_sessions(comm).comm)
        importlib.import_module("matex_data.epochs.prefetcher")  # whose handler waits for the other ranks
        run_exit_handlers_first()
    sys.argv = [str(script), *arguments]
    for patch in patches:
        after_import(("keras", "tensorflow"), functools.partial(_ending_the_job, patch))
    if model > 1 or stages != 1 or strategy != "chained":
        importlib.import_module("keras")  # all ranks make the mesh, or the communicators of threads, at once

    def execute() -> None:
        if as_module:
            _run_module(str(script))
        else:
            _run_script(Path(script).absolute())

    _ending_the_job(execute)


def _ending_the_job(call: Callable[[], None]) -> None:
    """Call a function; an error of it ends the job, also where the script would handle it."""
    try:
        call()
    except Preempted:
        raise  # an ordinary end: of one by os._exit, MPICH's launcher may report another exit code
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) or end.code is None else 1
        exit_with(code or 0, "" if end.code is None or isinstance(end.code, int) else f"{end.code}")
    except BaseException as error:  # KeyboardInterrupt, too, has to end the job
        abort.unmute_stderr()
        sys.excepthook(*sys.exc_info())
        exit_with(abort.exit_code(type(error)))


def _run_script(path: Path) -> None:
    """Run a script like ``python``: ``__file__`` is absolute, and ``sys.argv`` remains."""
    sys.path.insert(0, str(path.resolve().parent))
    if path.suffix == ".pyc" or pkgutil.get_importer(str(path)) is not None:  # a folder or an archive
        runpy.run_path(str(path), run_name="__main__")
        return
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = str(path)
    exec(compile(path.read_bytes(), path, "exec", dont_inherit=True), vars(main))


def _run_module(name: str) -> None:
    """Run a module like ``python -m``; raise ``SystemExit`` if there is none."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):  # of an import within the package
            raise
        spec = None
    if spec is None:
        raise SystemExit(
            f"matex run: there is no module {name!r}\n"
            f"  expected: a module in {sys.path[0]!r}, or one that is installed\n"
            "  remedy: start in the folder that contains the package; or give the path of a script, without -m"
        )
    package = importlib.util.find_spec(name.partition(".")[0])
    if package is not None:
        for path in package.submodule_search_locations or ():
            count_as_script(path + os.sep)
        if package.origin is not None:
            count_as_script(package.origin)
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _warn_of_hashes(comm: Communicator) -> None:
    """Warn if the hashes of strings differ between the ranks. *Collective*."""
    (equal,) = comm.same(hash("matex_data"))
    if not equal and comm.rank == 0:
        log.warning(
            "the ranks hash strings differently, so that sets have another order on each rank\n"
            "  remedy: start the script by the command matex run or python -m matex_data run, which chooses one seed; "
            "or set PYTHONHASHSEED to one number on all ranks"
        )


def _prepared(
    strategy: Any,
    wire_dtype: Any,
    collectives: Any,
    sync_batch_norm: bool,
    verify: Any,
    model: int,
    shard_optimizer: bool,
    staged: dict[str, Any],
    saved: tuple[Path, int | None] | None,
) -> Callable[[], None]:
    """Seed all ranks equally, share files, and return what patches Keras and TensorFlow later. *Collective*.

    What is returned is not collective where no rank has a GPU: ranks may import TensorFlow at different lines.
    """
    from matex_data.mpi.node import local_rank
    from matex_data.training.comm.channel import open_channel
    from matex_data.training.launcher.inputs import patch_ports
    from matex_data.training.launcher.native_openers import patch_native_openers
    from matex_data.training.launcher.openers import shared_files
    from matex_data.training.launcher.seeding import script_seed, seed_all_ranks

    channel = open_channel(None)
    if collectives == "auto" and (strategy != "chained" or model > 1 or staged):
        collectives = "mpi"
    equal = Equal({"collectives": collectives}, "the ranks choose different collectives", "give the same to all ranks")
    (most,) = channel.communicator.agree(equal=equal, numbers=[gpus()])
    local = local_rank(channel.user)
    seed_all_ranks(channel, None if saved is None else script_seed(saved[0], channel))
    if saved is not None:
        REQUESTS.install()  # what comes before the first step is remembered
    root, files = shared_files(channel) if channel.size > 1 else (None, None)
    if files is not None:
        patch_native_openers(files)
    patch_ports(channel.rank)

    def patch() -> None:
        from matex_data.training import keras_api
        from matex_data.training.comm.runtime import start, take_own_gpu
        from matex_data.training.compat import patch_sessions
        from matex_data.training.launcher.keras_patches import KerasPatches
        from matex_data.training.launcher.loops import LoopPatches, patch_functions, patch_pipelines
        from matex_data.training.launcher.meshes import patch_distributions, patch_strategies
        from matex_data.training.launcher.resuming import ScriptCheckpoints
        from matex_data.training.launcher.saving import patch_saving
        from matex_data.training.launcher.staged import StagePatches
        from matex_data.training.model_parallel.mesh import Mesh
        from matex_data.training.reduction.ops import Reducer, broadcast_from_root

        _check_backend()
        if collectives == "tensorflow" or (collectives == "auto" and most):
            start(collectives)
        else:
            take_own_gpu(local, channel.rank)
        parts = (keras_api.PARTS,) if model > 1 or staged else ()
        keras_api.check(channel.rank, channel.size, keras_api.TRAINING, keras_api.RUN, *parts)
        checkpoints = None if saved is None else ScriptCheckpoints(*saved)
        patches: KerasPatches | None = None
        if staged:
            options = {"sync_batch_norm": sync_batch_norm, "wire_dtype": wire_dtype, "shard_optimizer": shard_optimizer}
            stage_patches = StagePatches(**staged, model=model, **options, checkpoints=checkpoints)
            patch_distributions(channel, stage_patches.use_mesh)
        else:
            checked: Any = verify if channel.size > 1 else "never"  # of one rank, nothing is shared out
            reducer = Reducer(channel, strategy, wire_dtype=wire_dtype, collectives=collectives)
            patches = KerasPatches(channel, reducer, sync_batch_norm, checked, shard_optimizer, checkpoints)
            if model > 1:
                patches.use_mesh(Mesh(model=model))
            patch_distributions(channel, patches.use_mesh)
            loops = LoopPatches(channel, reducer, patches.check_loop)
            received = functools.partial(broadcast_from_root, channel)
            patch_sessions(loops.average, received, loops.is_active, loops.warn_of_whole_batches)
        if root is not None:
            patch_functions(channel.rank)
            patch_pipelines()
            patch_saving(channel, files)
            if patches is not None:
                patches.asked = lambda: bool(root.asked) or not root.available
            patch_strategies(channel)

    return patch


def _check_backend() -> None:
    import keras

    if keras.backend.backend() != "tensorflow":
        raise SystemExit(
            f"matex run needs the Keras backend tensorflow, not {keras.backend.backend()}\n"
            "  remedy: set KERAS_BACKEND=tensorflow, or unset it"
        )


def _add_matex_data_set() -> None:
    """Add MaTEx's ``DataSet`` to TensorFlow, where scripts for MaTEx expect it, also those of TensorFlow 1."""
    import tensorflow as tf
    import tensorflow.compat.v1 as tf1

    import matex_data

    for module in (tf, tf1, tf.compat.v1):  # modules of their own, or one
        module.DataSet = lambda *args, **kwargs: matex_data.DataSet(*args, **kwargs)


def _mute_output() -> None:
    """Silence this rank, except for errors and for warnings of this package."""
    sys.stdout.flush()
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, sys.stdout.fileno())
    os.close(silence)
    errors = abort.mute_stderr()
    warnings.simplefilter("ignore")
    faulthandler.enable(errors)
    logging.getLogger("matex_data").addHandler(logging.StreamHandler(os.fdopen(os.dup(errors), "w")))
    original = threading.excepthook

    def hook(arguments: threading.ExceptHookArgs) -> None:
        with abort.stderr():
            original(arguments)

    threading.excepthook = hook


if __name__ == "__main__":
    main()
