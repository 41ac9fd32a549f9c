"""Synchronous data-parallel training of Keras models; graphs contain the average over the ranks.

The first function that needs TensorFlow imports it, not this package, unless ``MATEX_COLLECTIVES`` asks for collectives
that have to be there before TensorFlow's first tensor.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if __name__ != "matex_data.training":
    raise ImportError("import this package as matex_data.training: two copies of a class would be two classes")

from matex_data.training.comm.world import World, world

if TYPE_CHECKING:
    from matex_data.training.average.optimizer import distribute
    from matex_data.training.exact.batch_weights import shard
    from matex_data.training.exact.variables import broadcast
    from matex_data.training.inference import evaluate, predict
    from matex_data.training.learning_rate import ScaledLearningRate
    from matex_data.training.model_parallel.deferred import deferred
    from matex_data.training.model_parallel.mesh import Mesh
    from matex_data.training.reduction.gathering import allgather, barrier, broadcast_object
    from matex_data.training.reduction.ops import allreduce
    from matex_data.training.restart.preemption import EXIT_PREEMPTED, stop_requested
    from matex_data.training.saving import save
    from matex_data.training.trainer import fit

__all__ = [
    "EXIT_PREEMPTED",
    "Mesh",
    "ScaledLearningRate",
    "World",
    "allgather",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_object",
    "deferred",
    "distribute",
    "evaluate",
    "fit",
    "predict",
    "save",
    "shard",
    "stop_requested",
    "world",
]

_MODULES = {
    "EXIT_PREEMPTED": "restart.preemption",
    "Mesh": "model_parallel.mesh",
    "ScaledLearningRate": "learning_rate",
    "allgather": "reduction.gathering",
    "allreduce": "reduction.ops",
    "barrier": "reduction.gathering",
    "broadcast": "exact.variables",
    "broadcast_object": "reduction.gathering",
    "deferred": "model_parallel.deferred",
    "distribute": "average.optimizer",
    "evaluate": "inference",
    "fit": "trainer",
    "predict": "inference",
    "save": "saving",
    "shard": "exact.batch_weights",
    "stop_requested": "restart.preemption",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # MPICH 5 under srun --mpi=pmi2 on two nodes hangs in MPI_Init once TensorFlow is loaded.
    importlib.import_module("matex_data.mpi.library")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    """Return all public names, also of what is not imported yet."""
    return sorted({*globals(), *__all__})


def _start_collectives() -> None:
    """Start TensorFlow's collectives if the environment asks for them; ``matex run`` does so itself. *Collective*."""
    choice = os.environ.get("MATEX_COLLECTIVES") or "mpi"
    if choice != "mpi" and "matex_data.cli" not in sys.modules:
        importlib.import_module("matex_data.mpi.library")
        importlib.import_module("matex_data.training.comm.runtime").start(choice)


_start_collectives()
