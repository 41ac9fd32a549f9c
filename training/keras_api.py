"""All private names of Keras and TensorFlow that this package uses, and the versions that have them.

Other modules import private objects from here. A version that was not tested may lack a name, or use it no longer, so
that what replaces it would have no effect: it is an error when this module is imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from matex_data.errors import UnsupportedVersion

TESTED = {"keras": ("3.7", "3.15"), "tensorflow": ("2.18", "2.21")}
"""Oldest and newest versions that the tests run with."""


def _check_versions() -> None:
    """Raise an error if Keras or TensorFlow is of another version than those that were tested.

    Raises
    ------
    UnsupportedVersion : it is.
    """
    installed = {"keras": keras.__version__, "tensorflow": tf.__version__}
    ranges = {name: tuple(map(_numbers, tested)) for name, tested in TESTED.items()}
    if not all(oldest <= _numbers(installed[name]) <= newest for name, (oldest, newest) in ranges.items()):
        raise UnsupportedVersion(
            "training needs private names of Keras and TensorFlow, which other versions may lack",
            expected=", ".join(f"{name} {oldest} to {newest}" for name, (oldest, newest) in TESTED.items()),
            found=", ".join(f"{name} {version}" for name, version in installed.items()),
            remedy="pip install " + " ".join(f"'{name}=={newest}.*'" for name, (_, newest) in TESTED.items()),
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split(".")[:2])


_check_versions()


def _imported(path: str) -> Any:
    """Return a module, or an object in it, which have no types."""
    module, _, name = path.rpartition(".")
    owner = importlib.import_module(module)
    return getattr(owner, name) if hasattr(owner, name) else importlib.import_module(path)


keras_random: Any = _imported("keras.src.backend.random")
"""Module with the random functions of the backend, which layers and ``keras.random`` call."""
keras_trainer: Any = _imported("keras.src.backend.tensorflow.trainer")
"""Module in which ``fit``, ``evaluate`` and ``predict`` look up ``TFEpochIterator``."""
EpochIterator: Any = _imported("keras.src.backend.tensorflow.trainer.TFEpochIterator")
Functional: Any = _imported("keras.src.models.functional.Functional")
keras_distribution: Any = _imported("keras.src.distribution.distribution_lib")
"""Module in which ``keras.distribution`` looks up devices and the current distribution."""
operation_fn: Any = _imported("keras.src.models.functional.operation_fn")
"""Function that adds arguments of a model's call, such as ``training``, to the call of an operation."""
CompileMetrics: Any = _imported("keras.src.trainers.compile_utils.CompileMetrics")
MetricsList: Any = _imported("keras.src.trainers.compile_utils.MetricsList")
apply_mask: Any = _imported("keras.src.losses.loss.apply_mask")
get_keras_mask: Any = _imported("keras.src.backend.get_keras_mask")
set_keras_mask: Any = _imported("keras.src.backend.set_keras_mask")
in_stateless_scope: Any = _imported("keras.src.backend.common.stateless_scope.in_stateless_scope")
keras_state: Any = _imported("keras.src.backend.common.global_state")
"""Module with objects that all of Keras shares, by name."""
pythonify_logs: Any = _imported("keras.src.utils.python_utils.pythonify_logs")
tf_keras_models: Any = _imported("keras._tf_keras.keras.models")
"""Module ``tf.keras.models``; it and ``tf.keras.saving`` have functions of their own."""
tf_keras_saving: Any = _imported("keras._tf_keras.keras.saving")
BaseSession: Any = _imported("tensorflow.python.client.session.BaseSession")
DatasetIterator: Any = _imported("tensorflow.python.data.ops.iterator_ops.OwnedIterator")
ControlFlowGraph: Any = _imported("tensorflow.python.ops.control_flow_v2_func_graphs.ControlFlowFuncGraph")
BATCHING: tuple[Any, ...] = (
    _imported("tensorflow.python.data.ops.batch_op._BatchDataset"),
    _imported("tensorflow.python.data.ops.batch_op._ParallelBatchDataset"),
    _imported("tensorflow.python.data.ops.padded_batch_op._PaddedBatchDataset"),
    _imported("tensorflow.python.data.experimental.ops.batching._MapAndBatchDataset"),
)
"""Datasets that make batches of the elements of another one."""
REGROUPING: tuple[Any, ...] = (
    _imported("tensorflow.python.data.ops.unbatch_op._UnbatchDataset"),
    _imported("tensorflow.python.data.ops.flat_map_op._FlatMapDataset"),
    _imported("tensorflow.python.data.ops.interleave_op._InterleaveDataset"),
    _imported("tensorflow.python.data.ops.interleave_op._ParallelInterleaveDataset"),
)
"""Datasets whose elements are others than those that they are made from: samples of batches, rows of files."""
tensorflow_context: Any = _imported("tensorflow.python.eager.context.context")
is_recording: Any = _imported("tensorflow.python.eager.record.could_possibly_record")

CHECKPOINT_MANAGER = ("_maybe_delete", "_latest_checkpoint", "_last_preserved_timestamp", "_last_checkpoint_step")
"""Attributes of ``tf.train.CheckpointManager`` that list its checkpoints."""
METRICS_OF_EPOCH = "_get_metrics_result_or_logs"
"""Method of a model that returns the logs at the end of an epoch or an evaluation."""
OF_FIT = "_use_cached_eval_dataset"
"""Argument that ``fit`` gives ``evaluate`` for its validation data."""
CALLBACK_STATE: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (keras.callbacks.EarlyStopping, ("wait", "stopped_epoch", "best", "best_epoch", "best_weights")),
    (keras.callbacks.ReduceLROnPlateau, ("wait", "cooldown_counter", "best")),
    (keras.callbacks.ModelCheckpoint, ("best", "_batches_seen_since_last_saving", "_last_batch_seen")),
    (keras.callbacks.SwapEMAWeights, ("_ema_weights_in_model",)),
)
"""Attributes of callbacks that change during training."""

ACCUMULATING = ("_backend_apply_gradients", "_clip_gradients", "apply")
"""Methods of an optimizer that decide how it adds up gradients."""
STEP_METHODS = (
    "_aggregate_additional_loss",
    "_compute_loss",
    "__call__",
    "add_loss",
    "compute_loss",
    "compute_metrics",
    "fit",
    "losses",
    "make_train_function",
    "train_step",
)
"""Methods and properties of a model that decide what a training step computes."""
SET_BY_KERAS = ("_build_shapes_dict", "_self_", "_tracked_")
"""Attributes of layers that neither their class nor ``Layer()`` shows, and beginnings of such."""
CHANGED_BY_CALLS = ("_called", "_dropout_mask", "_loss_ids", "_losses", "_recurrent_dropout_mask")
"""Attributes of layers that Keras itself changes when a layer is called."""
INITIALIZER = "_initializer"
"""Attribute of a variable without values: the function that returns them."""
UNINITIALIZED = "uninitialized_variables"
"""Name in ``keras_state`` of the variables that were created in a stateless scope."""
OTHER_ATTRIBUTES = (
    *("_accumulated_gradients", "_assert_compile_called", "_compile_loss", "_compile_metrics", "_context_handle"),
    *("_distributed_dataset", "_dropout_layer", "_flat_losses", "_flatten_layers", "_flatten_metrics_in_order"),
    *("_fn", "_fn_kwargs", "_func", "_gate_dense", "_get_function", "_get_own_losses", "_jit_compile"),
    *("_layout_map", "_learning_rate", "_loss_tracker", "_maybe_autocast", "_moments", "_nodes_by_depth"),
    *("_non_trainable_variables", "_path", "_reduction_axes", "_seed_generators", "_standardize_inputs"),
    *("_symbolic_build", "_use_gate", "_use_weight_decay", "_var_key"),
)
"""Other private attributes that this package uses: what to look at before a newer version is allowed."""


def tensorflow_has_started() -> bool:
    """Return whether TensorFlow has chosen its devices, as it does for its first tensor."""
    return tensorflow_context()._context_handle is not None


def take_uninitialized() -> list[Any]:
    """Return the variables that were created in a stateless scope and have no values; Keras forgets them."""
    found = keras_state.get_global_attribute(UNINITIALIZED) or []
    keras_state.set_global_attribute(UNINITIALIZED, [])
    return list(found)


def initial_value(variable: Any) -> Any:
    """Return the initial value of a variable without values, a NumPy array."""
    return tf.convert_to_tensor(variable._initializer(variable._shape, dtype=variable._dtype)).numpy()


def held_value(variable: Any) -> Any:
    """Return what this rank holds of a Keras variable, a NumPy array of its own."""
    return np.array(variable._value.numpy())


def set_value(variable: Any, value: Any) -> None:
    """Give a Keras variable a value of any shape; what has read the variable before keeps the old one."""
    object.__setattr__(variable, "_shape", tuple(value.shape))
    object.__setattr__(variable, "_initializer", None)
    object.__setattr__(variable, "_value", tf.Variable(value, trainable=variable.trainable, name=variable.name))


def note_variables(optimizer: Any, variables: Sequence[Any]) -> None:
    """Let a built optimizer, or one within it, update these variables in place of those that it was built for."""
    if hasattr(optimizer, "inner_optimizer"):
        note_variables(optimizer.inner_optimizer, variables)
    object.__setattr__(optimizer, "_trainable_variables", list(variables))
    optimizer._trainable_variables_indices = {optimizer._var_key(v): i for i, v in enumerate(variables)}
