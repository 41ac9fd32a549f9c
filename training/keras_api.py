"""All private names of Keras and TensorFlow that this package uses.

Other modules import private objects from here, and use the private attributes that ``ATTRIBUTES`` lists. ``check``
raises an error before a feature is used on several ranks, if the installed version lacks one of its names.
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

TRAINING, PARTS, CHECKPOINTS, RUN = "training", "models in parts", "checkpoints", "matex run"
COLLECTIVES = "collectives of TensorFlow"
"""Features, whose names are checked when they are used: on several ranks, with a mesh, with checkpoints, unchanged."""
TESTED = {"keras": ("3.7", "3.15"), "tensorflow": ("2.18", "2.21")}
"""Oldest and newest versions that the tests run with."""


class _Absent(type):
    """Class in place of an object that the installed version lacks; whatever uses it raises an error."""

    path = ""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Raise ``UnsupportedVersion``."""
        raise _unsupported([cls.path])

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _unsupported([cls.path])


def _imported(path: str, feature: str = TRAINING) -> Any:
    """Return a module, or an object in it; a stand-in, with an entry in ``_lacking``, if there is neither."""
    module, _, name = path.rpartition(".")
    try:
        owner = importlib.import_module(module)
        return getattr(owner, name) if hasattr(owner, name) else importlib.import_module(path)
    except ImportError:
        _lacking.append((feature, path))
        return _Absent(name, (), {"path": path})


def _unsupported(names: Sequence[str]) -> UnsupportedVersion:
    return UnsupportedVersion(
        f"this needs {', '.join(names)}, which this Keras or TensorFlow does not have",
        expected=_ranges(),
        found=", ".join(f"{name} {version}" for name, version in _installed().items()),
        remedy="pip install " + " ".join(f"'{name}=={newest}.*'" for name, (_, newest) in TESTED.items()),
    )


def _installed() -> dict[str, str]:
    return {"keras": keras.__version__, "tensorflow": tf.__version__}


def _ranges() -> str:
    return ", ".join(f"{name} {oldest} to {newest}" for name, (oldest, newest) in TESTED.items())


_lacking: list[tuple[str, str]] = []

keras_random: Any = _imported("keras.src.backend.random", RUN)
"""Module with the random functions of the backend, which layers and ``keras.random`` call."""
keras_trainer: Any = _imported("keras.src.backend.tensorflow.trainer")
"""Module in which ``fit``, ``evaluate`` and ``predict`` look up ``TFEpochIterator``."""
EpochIterator: Any = _imported("keras.src.backend.tensorflow.trainer.TFEpochIterator")
Functional: Any = _imported("keras.src.models.functional.Functional", PARTS)
keras_distribution: Any = _imported("keras.src.distribution.distribution_lib", RUN)
"""Module in which ``keras.distribution`` looks up devices and the current distribution."""
operation_fn: Any = _imported("keras.src.models.functional.operation_fn", PARTS)
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
tf_keras_models: Any = _imported("keras._tf_keras.keras.models", RUN)
"""Module ``tf.keras.models``; it and ``tf.keras.saving`` have functions of their own."""
tf_keras_saving: Any = _imported("keras._tf_keras.keras.saving", RUN)
BaseSession: Any = _imported("tensorflow.python.client.session.BaseSession", RUN)
dataset_operations: Any = _imported("tensorflow.python.ops.gen_dataset_ops", RUN)
parallel_operations: Any = _imported("tensorflow.python.ops.gen_experimental_dataset_ops", RUN)
"""Modules with the operations of ``tf.data``, as its datasets call them."""
DatasetFunction: Any = _imported("tensorflow.python.data.ops.structured_function.StructuredFunctionWrapper")
DatasetIterator: Any = _imported("tensorflow.python.data.ops.iterator_ops.OwnedIterator")
FuncGraph: Any = _imported("tensorflow.python.framework.func_graph.FuncGraph", CHECKPOINTS)
CacheDataset: Any = _imported("tensorflow.python.data.ops.cache_op.CacheDataset", CHECKPOINTS)
ControlFlowGraph: Any = _imported("tensorflow.python.ops.control_flow_v2_func_graphs.ControlFlowFuncGraph", RUN)
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
tensorflow_context: Any = _imported("tensorflow.python.eager.context.context", COLLECTIVES)
Context: Any = _imported("tensorflow.python.eager.context.Context", COLLECTIVES)
is_recording: Any = _imported("tensorflow.python.eager.record.could_possibly_record")

CHECKPOINT_MANAGER = ("_maybe_delete", "_latest_checkpoint", "_last_preserved_timestamp", "_last_checkpoint_step")
"""Attributes of ``tf.train.CheckpointManager`` that list its checkpoints."""
READ_VARIABLES = "_watched_variables"
"""Attribute of a graph that is being traced: a set of the variables that it reads."""
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

ORDERED: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (
        dataset_operations,
        ("parallel_batch_dataset", "parallel_interleave_dataset_v4", "parallel_map_dataset_v2"),
    ),
    (parallel_operations, ("legacy_parallel_interleave_dataset_v2", "parse_example_dataset_v2")),
)
"""Operations of ``tf.data`` that may be asked for elements in the order in which threads have them."""
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

PrivateNames = tuple[tuple[Any, tuple[str, ...]], ...]
ATTRIBUTES: dict[str, PrivateNames] = {
    TRAINING: (
        (
            keras.Model,
            (
                METRICS_OF_EPOCH,
                "_assert_compile_called",
                "_flatten_layers",
                "_symbolic_build",
                "make_train_function",
                "test_on_batch",
                "test_step",
                "train_step",
            ),
        ),
        (keras.layers.Layer, ("_flatten_layers", "_get_own_losses")),
        (keras_state, ("get_global_attribute", "set_global_attribute")),
        (keras.layers.BatchNormalization, ("_moments",)),
        (
            keras.optimizers.Optimizer,
            (
                *("_backend_apply_gradients", "_clip_gradients", "_use_weight_decay", "_var_key", "apply"),
                "finalize_variable_values",
            ),
        ),
        (keras.optimizers.LossScaleOptimizer, ("check_finite",)),
        (keras.metrics.MeanMetricWrapper, ("update_state",)),
        (keras.random.SeedGenerator, ("next",)),
        (keras.callbacks.ProgbarLogger, ("_finalize_progbar", "_update_progbar")),
        (tf.data.Dataset, ("_functions", "_inputs")),
        (DatasetIterator, ("_type_spec", "get_next")),
    ),
    PARTS: ((keras.Variable, ("_maybe_autocast",)),),
    CHECKPOINTS: ((EpochIterator, ("_enumerate_iterator", "_get_iterator")),),
    RUN: (
        (keras.Model, ("_flatten_metrics_in_order",)),
        (EpochIterator, ("_enumerate_iterator", "_get_iterator")),
        (keras_random, ("dropout", "normal", "randint", "truncated_normal", "uniform")),
        (tf.Graph, ("_get_function",)),
        *ORDERED,
    ),
}
"""Attributes of classes and modules: private ones, and public ones that this package replaces."""

OBJECT_ATTRIBUTES: dict[str, PrivateNames] = {
    TRAINING: (
        (
            keras.Model,
            ("_compile_loss", "_compile_metrics", "_jit_compile", "_loss_tracker", "test_function", "train_function"),
        ),
        (keras.layers.Layer, ("_non_trainable_variables", "_trainable_variables")),
        (keras.layers.BatchNormalization, ("_reduction_axes", "synchronized")),
        (
            keras.optimizers.Optimizer,
            ("_accumulated_gradients", "_learning_rate", "_trainable_variables", "_trainable_variables_indices"),
        ),
        (keras.metrics.MeanMetricWrapper, ("_fn", "_fn_kwargs")),
        (CompileLoss, ("_flat_losses",)),
        (DatasetFunction, ("_func",)),
    ),
    PARTS: (
        (keras.Model, ("_call_has_training_arg",)),
        (keras.Sequential, ("_functional",)),
        (keras.distribution.ModelParallel, ("_layout_map",)),
        (Functional, ("_nodes_by_depth", "_standardize_inputs")),
        (keras.layers.MultiHeadAttention, ("_dropout_layer",)),
        (keras.Variable, ("_initializer", "_path", "_shape", "_value")),
    ),
    CHECKPOINTS: (*CALLBACK_STATE, (EpochIterator, ("_distributed_dataset",)), (FuncGraph, (READ_VARIABLES,))),
    COLLECTIVES: ((Context, ("_context_handle",)),),
    RUN: (
        (EpochIterator, ("_distributed_dataset", "_num_batches", "data_adapter")),
        (tf.train.CheckpointManager, CHECKPOINT_MANAGER),
    ),
}
"""Attributes that methods of a class give its objects."""

GATE_OF_ATTENTION = ("_use_gate", "_gate_dense")
"""Attributes of attention layers in newer versions of Keras: whether there is a gate, and its layer."""
INITIALIZER = "_initializer"
"""Attribute of a variable without values: the function that returns them."""
STATELESS = "stateless_scope"
"""Name in ``keras_state`` of the innermost stateless scope."""
UNINITIALIZED = "uninitialized_variables"
"""Name in ``keras_state`` of the variables that were created in a stateless scope."""

ARGUMENTS = {TRAINING: ((keras.Model, OF_FIT),)}
"""Arguments that methods take by ``**kwargs``."""

_checked: set[str] = set()


def variables_read() -> list[Any]:
    """Return the variables that the function that TensorFlow is tracing has read so far; none outside of one."""
    return list(getattr(tf.compat.v1.get_default_graph(), READ_VARIABLES, ()))


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


def check(rank: int, size: int, *features: str) -> None:
    """Check once that Keras and TensorFlow have the names of features; warn about untested versions.

    Parameters
    ----------
    rank : rank of this process; only rank 0 warns.
    size : number of ranks; on one, training needs few of the names, and a missing one is a warning.
    features : that are about to be used.

    Raises
    ------
    UnsupportedVersion : a name is missing.
    """
    first = not _checked
    new = [feature for feature in features if feature not in _checked]
    _checked.update(new)
    found = [name for feature in new for name in missing(feature)]
    if found and size > 1:
        _checked.difference_update(new)
        raise _unsupported(found)
    if found:
        log.warning("%s", _unsupported(found))
    untested = [f"{name} {version}" for name, version in _installed().items() if not _is_tested(name, version)]
    if first and untested and rank == 0:
        log.warning("%s: matex_data was tested with %s", " and ".join(untested), _ranges())


def missing(feature: str) -> list[str]:
    """Return the objects, attributes and arguments of a feature that the installed versions lack.

    An attribute of objects counts if the methods of the class use its name. Creating an object instead might initialize
    devices before the script configures them.
    """
    found = [path for needed, path in _lacking if needed == feature]
    for listed, has in ((ATTRIBUTES, hasattr), (OBJECT_ATTRIBUTES, _uses)):
        known = [(owner, names) for owner, names in listed.get(feature, ()) if not isinstance(owner, _Absent)]
        found += [f"{_name(owner)}.{name}" for owner, names in known for name in names if not has(owner, name)]
    found += [f"{_name(owner)}(... {name}=)" for owner, name in ARGUMENTS.get(feature, ()) if not _takes(owner, name)]
    return found


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
