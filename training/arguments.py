"""Arguments of Keras's kinds: models, data sets, callbacks and the options of Keras's own functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from matex_data.arguments import check_arguments
from matex_data.errors import ArgumentError
from matex_data.training.comm.channel import Channel, open_channel
from matex_data.warning import warn


def open_checked(
    call: str, function: Callable[..., Any], arguments: Mapping[str, Any], check: Callable[[], None] | None = None
) -> Channel:
    """Return the ranks of a call, each of which has looked at its arguments. *Collective*.

    Parameters
    ----------
    function, arguments : see `check_arguments`; the ranks are those of ``comm``, or the replicas of ``mesh``.
    check : raises an error if something else is wrong.

    Raises
    ------
    ArgumentError, and the errors of ``check`` : on all ranks, if one has an argument of another kind.
    """
    comm, mesh = arguments.get("comm"), arguments.get("mesh")
    check_arguments(function, {"comm": comm, "mesh": mesh}, call)
    channel = open_channel(comm if mesh is None else mesh.data)

    def check_all() -> None:
        check_arguments(function, arguments, call)
        if check is not None:
            check()

    channel.communicator.agreed(check_all)
    return channel


def check_model(call: str, model: Any, compiled: bool = False) -> None:
    """Raise ``ArgumentError`` unless a model is one of Keras, and compiled if it has to be."""
    if not isinstance(model, keras.Model):
        raise ArgumentError(f"{call}() takes no model= of this kind", expected="a Keras model", found=repr(model))
    if compiled and not model.compiled:
        raise ArgumentError(
            f"{call}() takes a model that is compiled",
            found=f"the model {model.name!r}, which is not",
            remedy="call model.compile(optimizer, loss) first, on all ranks",
        )


def check_dataset(call: str, dataset: Any) -> None:
    """Raise ``ArgumentError`` unless data is a ``matex_data.Dataset`` or a ``tf.data.Dataset``."""
    if not hasattr(dataset, "tf_dataset") and not isinstance(dataset, tf.data.Dataset):
        raise ArgumentError(
            f"{call}() takes no data of this kind",
            expected="a matex_data.Dataset or a tf.data.Dataset",
            found=type(dataset).__name__,
            remedy="md.open_dataset(path); md.training.shard(tf.data.Dataset.from_tensor_slices(arrays).batch(n))",
        )


def warn_of_ignored(call: str, dataset: Any, options: Mapping[str, Any]) -> None:
    """Warn of options that make batches, beside data that have theirs; filters may make this an error."""
    for name in ("batch_size", "shuffle"):
        if options.get(name) and isinstance(dataset, tf.data.Dataset):
            warn(
                f"{call}(): {name}={options[name]!r} does not apply to a tf.data.Dataset, which has its batches, in "
                f"their order, already; give {name}= to tf_dataset(), or call batch() or shuffle() of the data"
            )


def check_keras_options(call: str, options: Mapping[str, Any]) -> None:
    """Raise ``ArgumentError`` if options that Keras's functions share have a value of another kind."""
    check_arguments(_keras_options, options, call)
    for callback in keras.tree.flatten(options.get("callbacks")):
        if callback is not None and not isinstance(callback, keras.callbacks.Callback):
            raise ArgumentError(
                f"{call}() takes no callbacks= of this kind",
                expected="keras.callbacks.Callback, or a list of them",
                found=repr(callback),
                remedy="make an object of the class" if isinstance(callback, type) else None,
            )


def _keras_options(
    *,
    initial_epoch: int,
    steps_per_epoch: int | None,
    validation_steps: int | None,
    validation_freq: int | Sequence[int],
    class_weight: Mapping[int, float] | None,
) -> None:
    """Declare options as ``keras.Model.fit`` documents them."""
