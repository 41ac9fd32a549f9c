"""All private names of Keras and TensorFlow that this package uses.

Other modules import private objects from here, and use the private attributes that ``ATTRIBUTES`` lists. ``check``
raises an error before training, if the installed version lacks one of them.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from matex_data.errors import UnsupportedVersion

log = logging.getLogger("matex_data.training")

TESTED = {"keras": ("3.7", "3.15"), "tensorflow": ("2.18", "2.21")}
"""Oldest and newest versions that the tests run with."""


def _imported(path: str) -> Any:
    """Return a module, or an object in it; None, with an entry in ``_not_found``, if there is neither."""
    module, _, name = path.rpartition(".")
    try:
        owner = importlib.import_module(module)
        return getattr(owner, name) if hasattr(owner, name) else importlib.import_module(path)
    except ImportError:
        _not_found.append(path)
        return None


def _raise_if_missing(names: Sequence[str]) -> None:
    """Raise an error if names are missing."""
    if names:
        raise UnsupportedVersion(
            f"training on several ranks needs {', '.join(names)}, which this Keras or TensorFlow does not have",
            expected=_ranges(),
            found=", ".join(f"{name} {version}" for name, version in _installed().items()),
            remedy="pip install " + " ".join(f"'{name}=={newest}.*'" for name, (_, newest) in TESTED.items()),
        )


def _installed() -> dict[str, str]:
    return {"keras": keras.__version__, "tensorflow": tf.__version__}


def _ranges() -> str:
    return ", ".join(f"{name} {oldest} to {newest}" for name, (oldest, newest) in TESTED.items())


_not_found: list[str] = []

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
CompileLoss: Any = _imported("keras.src.trainers.compile_utils.CompileLoss")
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
gradient_registry: Any = _imported("tensorflow.python.framework.ops.gradient_registry")
"""Functions that compute gradients, by type of operation or by the name that replaces it."""
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
is_recording: Any = _imported("tensorflow.python.eager.record.could_possibly_record")

_raise_if_missing(_not_found)  # other modules derive classes from them at import

CHECKPOINT_MANAGER = ("_maybe_delete", "_latest_checkpoint", "_last_preserved_timestamp", "_last_checkpoint_step")
"""Attributes of ``tf.train.CheckpointManager`` that list its checkpoints."""
METRICS_OF_EPOCH = "_get_metrics_result_or_logs"
"""Method of a model that returns the logs at the end of an epoch or an evaluation."""
CALLBACK_STATE: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (keras.callbacks.EarlyStopping, ("wait", "stopped_epoch", "best", "best_epoch", "best_weights")),
    (keras.callbacks.ReduceLROnPlateau, ("wait", "cooldown_counter", "best")),
    (keras.callbacks.ModelCheckpoint, ("best", "_batches_seen_since_last_saving", "_last_batch_seen")),
    (keras.callbacks.SwapEMAWeights, ("_ema_weights_in_model",)),
)
"""Attributes of callbacks that change during training."""

STEP_METHODS = (
    "_aggregate_additional_loss",
    "_compute_loss",
    "__call__",
    "add_loss",
    "compute_loss",
    "fit",
    "losses",
    "make_train_function",
    "train_step",
)
"""Methods and properties of a model that decide what a training step computes."""
NAME_OF_GRADIENT = "_gradient_op_type"
"""Attribute of an operation whose gradient is not that of its type: the name in ``gradient_registry``."""
SET_BY_KERAS = ("_build_shapes_dict", "_self_", "_tracked_")
"""Attributes of layers that neither their class nor ``Layer()`` shows, and beginnings of such."""
CHANGED_BY_CALLS = ("_called", "_dropout_mask", "_loss_ids", "_losses", "_recurrent_dropout_mask")
"""Attributes of layers that Keras itself changes when a layer is called."""

ATTRIBUTES: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (
        keras.Model,
        (
            METRICS_OF_EPOCH,
            "_assert_compile_called",
            "_flatten_layers",
            "_flatten_metrics_in_order",
            "_symbolic_build",
            "make_train_function",
            "test_on_batch",
            "test_step",
            "train_step",
        ),
    ),
    (keras.layers.Layer, ("_flatten_layers", "_get_own_losses")),
    (keras.Variable, ("_maybe_autocast",)),
    (keras_state, ("get_global_attribute", "set_global_attribute")),
    (keras.layers.BatchNormalization, ("_moments",)),
    (
        keras.optimizers.Optimizer,
        ("_backend_apply_gradients", "_clip_gradients", "_var_key", "apply", "finalize_variable_values"),
    ),
    (keras.optimizers.LossScaleOptimizer, ("check_finite",)),
    (keras.metrics.MeanMetricWrapper, ("update_state",)),
    (EpochIterator, ("_enumerate_iterator",)),
    (keras_random, ("dropout", "normal", "randint", "truncated_normal", "uniform")),
    (keras.callbacks.ProgbarLogger, ("_finalize_progbar", "_update_progbar")),
    (tf.Graph, ("_get_function",)),
    (tf.data.Dataset, ("_inputs",)),
    (DatasetIterator, ("_type_spec", "get_next")),
)
"""Attributes of classes and modules: private ones, and public ones that this package replaces."""

OBJECT_ATTRIBUTES: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (
        keras.Model,
        (
            *("_call_has_training_arg", "_compile_loss", "_compile_metrics", "_jit_compile", "_loss_tracker"),
            *("test_function", "train_function"),
        ),
    ),
    (keras.Sequential, ("_functional",)),
    (keras.distribution.ModelParallel, ("_layout_map",)),
    (Functional, ("_nodes_by_depth", "_standardize_inputs")),
    (keras.layers.Layer, ("_non_trainable_variables", "_seed_generators", "_trainable_variables")),
    (keras.layers.MultiHeadAttention, ("_dropout_layer",)),
    (keras.Variable, ("_initializer", "_path", "_shape", "_value")),
    (keras.layers.BatchNormalization, ("_reduction_axes", "synchronized")),
    (keras.optimizers.Optimizer, ("_learning_rate", "_trainable_variables", "_trainable_variables_indices")),
    (keras.metrics.MeanMetricWrapper, ("_fn", "_fn_kwargs")),
    (CompileLoss, ("_flat_losses",)),
    (EpochIterator, ("_distributed_dataset", "_num_batches", "data_adapter")),
    *CALLBACK_STATE,
    (tf.train.CheckpointManager, CHECKPOINT_MANAGER),
)
"""Attributes that methods of a class give its objects."""

GATE_OF_ATTENTION = ("_use_gate", "_gate_dense")
"""Attributes of attention layers in newer versions of Keras: whether there is a gate, and its layer."""
INITIALIZER = "_initializer"
"""Attribute of a variable without values: the function that returns them."""
UNINITIALIZED = "uninitialized_variables"
"""Name in ``keras_state`` of the variables that were created in a stateless scope."""

ARGUMENTS = ((keras.Model, "_use_cached_eval_dataset"),)
"""Arguments that methods take by ``**kwargs``; ``fit`` passes this one when it evaluates its validation data."""

_checked: list[bool] = []


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


def drop_value(variable: Any) -> None:
    """Take the value of a Keras variable away; its shape stays."""
    object.__setattr__(variable, "_value", None)


def check(rank: int) -> None:
    """Check once that Keras and TensorFlow have all names; warn about untested versions.

    Parameters
    ----------
    rank : rank of this process; only rank 0 warns.

    Raises
    ------
    UnsupportedVersion : a name is missing.
    """
    if _checked:
        return
    _raise_if_missing(missing())
    _checked.append(True)
    untested = [f"{name} {version}" for name, version in _installed().items() if not _is_tested(name, version)]
    if untested and rank == 0:
        log.warning("%s: matex_data was tested with %s", " and ".join(untested), _ranges())


def missing() -> list[str]:
    """Return the attributes and arguments that the installed versions lack.

    An attribute of objects counts if the methods of the class use its name. Creating an object instead might initialize
    devices before the script configures them.
    """
    of_classes = [(owner, name) for owner, names in ATTRIBUTES for name in names if not hasattr(owner, name)]
    of_objects = [(owner, name) for owner, names in OBJECT_ATTRIBUTES for name in names if not _uses(owner, name)]
    arguments = [f"{_name(owner)}(... {name}=)" for owner, name in ARGUMENTS if not _takes(owner, name)]
    return [*(f"{_name(owner)}.{name}" for owner, name in of_classes + of_objects), *arguments]


def _uses(owner: Any, attribute: str) -> bool:
    """Return whether a method uses the name of an attribute."""
    return any(attribute in code.co_names for code in _codes(owner))


def _takes(owner: Any, argument: str) -> bool:
    """Return whether a method reads an argument from its ``**kwargs``."""
    return any(argument in code.co_consts for code in _codes(owner))


def _codes(owner: Any) -> Iterator[CodeType]:
    """Yield the code of all methods of a class and its bases."""
    for value in (value for kind in getattr(owner, "__mro__", ()) for value in vars(kind).values()):
        for function in (value.fget, value.fset) if isinstance(value, property) else (value,):
            plain: Any = getattr(function, "__func__", function)
            code = getattr(inspect.unwrap(plain), "__code__", None)
            if isinstance(code, CodeType):
                yield code


def _name(owner: Any) -> str:
    return owner.__qualname__ if inspect.isclass(owner) else owner.__name__


def _is_tested(name: str, version: str) -> bool:
    oldest, newest = TESTED[name]
    return _numbers(oldest) <= _numbers(version) <= _numbers(newest)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split(".")[:2])
