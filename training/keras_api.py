"""Private names of Keras and TensorFlow: all that this package uses, in one place.

Other modules import from here what has to be imported. Attributes they use where they need them; ``ATTRIBUTES`` lists
these, so that a version without one of them is refused before anything is trained.
"""

from __future__ import annotations

import dis
import importlib
import inspect
import logging
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any

import keras
import tensorflow as tf

from matex_data.errors import UnsupportedVersion

log = logging.getLogger("matex_data.training")

TESTED = {"keras": ("3.7", "3.15"), "tensorflow": ("2.18", "2.21")}
"""The oldest and the newest versions that the tests have run with."""


def _imported(path: str) -> Any:
    """Return a module, or what a module has under the last name; where there is none, note it."""
    module, _, name = path.rpartition(".")
    try:
        owner = importlib.import_module(module)
        return getattr(owner, name) if hasattr(owner, name) else importlib.import_module(path)
    except ImportError:
        _not_found.append(path)
        return None


def _refuse(names: Sequence[str]) -> None:
    """Raise an error with the names that are missing, if any are."""
    if names:
        raise UnsupportedVersion(
            f"Keras or TensorFlow has no {', '.join(names)}, which training on several ranks needs",
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
"""Module: the random functions of the backend, which layers and ``keras.random`` call."""
keras_trainer: Any = _imported("keras.src.backend.tensorflow.trainer")
"""Module: ``fit``, ``evaluate`` and ``predict`` make the ``TFEpochIterator`` that they find there."""
EpochIterator: Any = _imported("keras.src.backend.tensorflow.trainer.TFEpochIterator")
CompileLoss: Any = _imported("keras.src.trainers.compile_utils.CompileLoss")
CompileMetrics: Any = _imported("keras.src.trainers.compile_utils.CompileMetrics")
MetricsList: Any = _imported("keras.src.trainers.compile_utils.MetricsList")
apply_mask: Any = _imported("keras.src.losses.loss.apply_mask")
get_keras_mask: Any = _imported("keras.src.backend.get_keras_mask")
set_keras_mask: Any = _imported("keras.src.backend.set_keras_mask")
pythonify_logs: Any = _imported("keras.src.utils.python_utils.pythonify_logs")
tf_keras_models: Any = _imported("keras._tf_keras.keras.models")
"""Module: ``tf.keras.models``, as ``tf_keras_saving`` is ``tf.keras.saving``; each has functions of its own."""
tf_keras_saving: Any = _imported("keras._tf_keras.keras.saving")
BaseSession: Any = _imported("tensorflow.python.client.session.BaseSession")
DatasetIterator: Any = _imported("tensorflow.python.data.ops.iterator_ops.OwnedIterator")
is_recording: Any = _imported("tensorflow.python.eager.record.could_possibly_record")

_refuse(_not_found)  # modules derive classes from some of them when they are imported

CHECKPOINT_MANAGER = ("_maybe_delete", "_latest_checkpoint", "_last_preserved_timestamp", "_last_checkpoint_step")
"""Attributes of ``tf.train.CheckpointManager``: the checkpoints that there are."""
METRICS_OF_EPOCH = "_get_metrics_result_or_logs"
"""Method of a model that gives the logs at the end of an epoch or an evaluation."""
CALLBACK_STATE: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (keras.callbacks.EarlyStopping, ("wait", "stopped_epoch", "best", "best_epoch", "best_weights")),
    (keras.callbacks.ReduceLROnPlateau, ("wait", "cooldown_counter", "best")),
    (keras.callbacks.ModelCheckpoint, ("best", "_batches_seen_since_last_saving", "_last_batch_seen")),
    (keras.callbacks.SwapEMAWeights, ("_ema_weights_in_model",)),
)
"""Attributes that change in the course of training."""

ATTRIBUTES: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (
        keras.Model,
        (
            METRICS_OF_EPOCH,
            "_assert_compile_called",
            "_compile_loss",
            "_flatten_layers",
            "_flatten_metrics_in_order",
            "_jit_compile",
            "_loss_tracker",
            "_symbolic_build",
            "make_train_function",
            "test_function",
            "test_on_batch",
            "test_step",
            "train_function",
            "train_step",
        ),
    ),
    (keras.layers.Layer, ("_flatten_layers", "_seed_generators", "_trainable_variables")),
    (keras.layers.BatchNormalization, ("_moments", "_reduction_axes", "synchronized")),
    (keras.optimizers.Optimizer, ("_learning_rate", "apply")),
    (keras.metrics.MeanMetricWrapper, ("_fn", "_fn_kwargs", "update_state")),
    (CompileLoss, ("_flat_losses",)),
    (EpochIterator, ("_distributed_dataset", "_enumerate_iterator", "_num_batches", "data_adapter")),
    (keras_random, ("dropout", "normal", "randint", "truncated_normal", "uniform")),
    *CALLBACK_STATE,
    (keras.callbacks.ProgbarLogger, ("_finalize_progbar", "_update_progbar")),
    (tf.data.Dataset, ("_inputs",)),
    (DatasetIterator, ("_type_spec", "get_next")),
    (tf.train.CheckpointManager, CHECKPOINT_MANAGER),
)
"""Attributes by the class, whose objects have them, or the module: private ones, and public ones that are replaced."""

ARGUMENTS = ((keras.Model, "_use_cached_eval_dataset"),)
"""Arguments that methods take by ``**kwargs``: by this one ``fit`` tells that it evaluates its validation data."""

_checked: list[bool] = []


def check(rank: int) -> None:
    """Make sure that Keras and TensorFlow have all names; warn once of versions that were not tested.

    Parameters
    ----------
    rank : 0 warns.

    Raises
    ------
    UnsupportedVersion : a name is missing.
    """
    if _checked:
        return
    _refuse(missing())
    _checked.append(True)
    untested = [f"{name} {version}" for name, version in _installed().items() if not _is_tested(name, version)]
    if untested and rank == 0:
        log.warning("%s: matex_data was tested with %s", " and ".join(untested), _ranges())


def missing() -> list[str]:
    """Return the attributes and arguments that there are not."""
    attributes = [f"{_name(owner)}.{name}" for owner, names in ATTRIBUTES for name in names if not has(owner, name)]
    return [*attributes, *(f"{_name(owner)}(... {name}=)" for owner, name in ARGUMENTS if not _takes(owner, name))]


def has(owner: Any, name: str) -> bool:
    """Tell whether objects of a class, or a module, have an attribute.

    No object is made, since that might initialize devices before the script can configure them: attributes that
    objects get one by one are found where the code of the class sets them.
    """
    return hasattr(owner, name) or any(
        step.opname == "STORE_ATTR" and step.argval == name
        for code in _codes(owner)
        if name in code.co_names
        for step in dis.get_instructions(code)
    )


def _takes(owner: Any, argument: str) -> bool:
    """Tell whether a method looks for an argument that its signature does not have."""
    return any(argument in code.co_consts for code in _codes(owner))


def _codes(owner: Any) -> Iterator[CodeType]:
    """Return the code of all methods of a class and its bases."""
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
