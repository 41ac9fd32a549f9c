"""Patches of Keras for ``matex run --stages``: ``fit`` of any model trains it in stages."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras

from matex_data.errors import PartitionError
from matex_data.mpi.activity import collective
from matex_data.training.comm.channel import open_channel
from matex_data.training.exact.digests import check_same
from matex_data.training.keras_api import OF_FIT, keras_trainer
from matex_data.training.launcher.keras_patches import PatchedCall, ShardedEpochIterator, call_within, is_within_call
from matex_data.training.launcher.resuming import ScriptCheckpoints
from matex_data.training.model_parallel.mesh import Mesh
from matex_data.training.model_parallel.stages.model import MicroBatches, StagedModel
from matex_data.training.model_parallel.stages.update import updating
from matex_data.training.reduction.rounding import WireDtype
from matex_data.training.replacements import patch, replaced
from matex_data.training.session import Session
from matex_data.training.trainer import keras_loop


class StagePatches:
    """Patches of ``keras.Model`` for training in stages. *Collective*.

    Parameters
    ----------
    stages, model : numbers of stages, and of parts of their layers.
    micro_batches, sync_batch_norm, wire_dtype, shard_optimizer : as in ``fit``.
    """

    def __init__(
        self,
        stages: int,
        micro_batches: MicroBatches,
        sync_batch_norm: bool,
        wire_dtype: WireDtype | None,
        shard_optimizer: bool,
        model: int = 1,
        checkpoints: ScriptCheckpoints | None = None,
    ) -> None:
        self._checkpoints = checkpoints
        self._mesh = Mesh(stages=stages, model=model)
        self._channel = open_channel(self._mesh.world)
        self._options: dict[str, Any] = {
            "micro_batches": micro_batches,
            "sync_batch_norm": sync_batch_norm,
            "wire_dtype": wire_dtype,
            "shard_optimizer": shard_optimizer,
        }
        self._running: StagedModel | None = None
        keras_trainer.TFEpochIterator = ShardedEpochIterator
        signature = inspect.signature(keras.Model.fit)

        def fit(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            options = dict(signature.bind(model, *args, **kwargs).arguments)
            return self._train(functools.partial(original, model), options.pop("self"), options)

        def evaluate(original: Any, *args: Any, **kwargs: Any) -> Any:
            if self._running is None or OF_FIT in kwargs:  # the model is whole, or fit evaluates
                return original(*args, **kwargs)
            return call_within(PatchedCall(self._running.replicas), functools.partial(original, *args), kwargs)

        patch(keras.Model, fit, "fit")
        patch(keras.Model, evaluate, "evaluate")
        _refuse_own_loops()

    def use_mesh(self, mesh: Mesh) -> None:
        """Raise ``PartitionError``: the script distributes its models itself."""
        raise PartitionError(
            "the script sets a distribution of its own, which matex run --stages does not cut into stages",
            expected="a script without keras.distribution.ModelParallel, or no --stages",
            found=f"ModelParallel over {mesh.shape[2]} devices",
            remedy="leave it out and give --model, which proposes layouts; or leave out --stages",
        )

    def _train(self, original: Callable[..., Any], model: Any, options: dict[str, Any]) -> Any:
        """Train a model in stages, like ``fit``. *Collective*."""
        model._assert_compile_called("fit")
        check_same(self._channel, "fit()", [options.get(name) for name in ("x", "y", "sample_weight")])
        staged = StagedModel(model, self._mesh, **self._options)
        saved = self._checkpoints
        run = None if saved is None else saved.next_run(self._channel, staged.replicas, options, is_within_call())
        session = Session(staged, options, run, self._options["shard_optimizer"])
        call = PatchedCall(staged.replicas, run=run)
        with (
            keras_loop(staged.replicas),
            collective("fit()"),
            session.running(),
            staged,
            replaced(self, _running=staged),
        ):
            session.begin(lambda: (call.spec, False))
            return call_within(call, original, options)


def _refuse_own_loops() -> None:
    """Let optimizers raise an error unless ``fit`` applies the gradients."""

    def apply(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not updating.get():
            raise PartitionError(
                "a loop of the script's own applies gradients, which matex run --stages cannot divide",
                expected="training by model.fit",
                found=f"{type(optimizer).__name__}.apply outside of fit",
                remedy="train with model.fit, or leave out --stages",
            )
        return original(optimizer, *args, **kwargs)

    patch(keras.optimizers.Optimizer, apply, "apply")
