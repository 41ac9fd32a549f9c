"""Models of Keras's own layers and losses, which are known to compute each row of a batch by itself.

Nothing has to be traced for these. Any other model is checked: code of a user's own may do anything.
"""

from __future__ import annotations

import types
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from matex_data.training.comm.channel import Channel
from matex_data.training.exact.metrics import custom_metrics, flat_metrics, is_along_rows
from matex_data.training.keras_api import STEP_METHODS, Functional


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


LAYERS = _names(
    "Activation ActivityRegularization AdaptiveAveragePooling1D AdaptiveAveragePooling2D AdaptiveAveragePooling3D "
    "AdaptiveMaxPooling1D AdaptiveMaxPooling2D AdaptiveMaxPooling3D Add AdditiveAttention AlphaDropout Attention "
    "Average AveragePooling1D AveragePooling2D AveragePooling3D BatchNormalization Bidirectional CenterCrop "
    "Concatenate Conv1D Conv1DTranspose Conv2D Conv2DTranspose Conv3D Conv3DTranspose ConvLSTM1D ConvLSTM2D "
    "ConvLSTM3D Cropping1D Cropping2D Cropping3D Dense DepthwiseConv1D DepthwiseConv2D Discretization Dot Dropout "
    "ELU EinsumDense Embedding Flatten GRU GaussianDropout GaussianNoise GlobalAveragePooling1D "
    "GlobalAveragePooling2D GlobalAveragePooling3D GlobalMaxPooling1D GlobalMaxPooling2D GlobalMaxPooling3D "
    "GroupNormalization GroupedQueryAttention Hashing Identity IntegerLookup LSTM LayerNormalization LeakyReLU "
    "Masking MaxPooling1D MaxPooling2D MaxPooling3D Maximum Minimum MultiHeadAttention Multiply Normalization PReLU "
    "Permute RMSNormalization RNN ReLU RepeatVector Rescaling Reshape Resizing ReversibleEmbedding SeparableConv1D "
    "SeparableConv2D SimpleRNN Softmax SpatialDropout1D SpatialDropout2D SpatialDropout3D SpectralNormalization "
    "StringLookup Subtract TimeDistributed UnitNormalization UpSampling1D UpSampling2D UpSampling3D ZeroPadding1D "
    "ZeroPadding2D ZeroPadding3D"
)
"""Classes of ``keras.layers``; a test compares each with its own rows alone."""
INNER = _names(
    "InputLayer Functional Sequential Model LSTMCell GRUCell SimpleRNNCell StackedRNNCells ConvLSTMCell LayerScale "
    "StochasticDepth"
)
"""Classes that contain layers, cells within layers, and layers of ``keras.applications``."""
OPERATIONS = _names(
    "Absolute Add Cast Cos Divide Equal Exp Greater GreaterEqual Less LessEqual Log LogicalAnd LogicalNot LogicalOr "
    "Maximum Minimum Multiply Negative NotEqual Power Relu Sigmoid Sin Sqrt Square Subtract Tanh TrueDivide Where"
)
"""Operations on symbolic tensors that compute each element by itself."""
NEW_AXIS = _names("ExpandDims OneHot Stack")
"""Operations that give each row a further axis, unless that is the first one."""
REDUCING = _names("All Any Max Mean Min Sum")
"""Operations that combine the elements along axes, which are not that of the rows if they are given."""
OF_NUMBERS = _names("Embedding Flatten Hashing Identity IntegerLookup Rescaling Reshape StringLookup")
"""Layers that compute each row by itself also if it is a single number, without an axis of its own."""
LOSSES = _names(
    "BinaryCrossentropy BinaryFocalCrossentropy CategoricalCrossentropy CategoricalFocalCrossentropy "
    "CategoricalGeneralizedCrossEntropy CategoricalHinge CosineSimilarity Huber KLDivergence LogCosh "
    "MeanAbsoluteError MeanAbsolutePercentageError MeanSquaredError MeanSquaredLogarithmicError Poisson "
    "SparseCategoricalCrossentropy"
)
"""Classes of ``keras.losses`` that have a value for each row."""
REDUCTIONS = ("sum_over_batch_size", "mean", "mean_with_sample_weight", "sum")
BROADCASTING = {
    "categorical_accuracy", "categorical_hinge", "hinge", "kl_divergence", "pearson_correlation", "poisson",
    "squared_hinge",
}  # fmt: skip
"""Functions of ``keras.metrics`` that take targets of shape (rows,) for one row, which each output (rows, 1) gets."""
_PACKAGES = {"keras", "tensorflow", "matex_data", "numpy", "builtins", "ml_dtypes", "collections", "inspect"}
_AXES = ("axis", "axes")
_RATES = ("rate", "dropout", "recurrent_dropout", "stddev", "drop_path_rate")


@dataclass(frozen=True)
class Proof:
    """Knowledge that a model trains on shards of a batch as on the whole batch, or reasons why there is none.

    Parameters
    ----------
    reasons : why it is not known, each as ``"layer: what it is"``; empty if it is.
    draws : the model draws random numbers for each row, so it is known up to these numbers.
    mark : checksum of its layers, by which ranks compare their models.
    """

    reasons: tuple[str, ...] = ()
    draws: bool = False
    mark: int = 0

    @property
    def proven(self) -> bool:
        """Return whether the model is known."""
        return not self.reasons


def prove(model: Any, leaves: Sequence[Any], has_rows: Sequence[bool | None], losses: bool = True) -> Proof:
    """Return whether a model, its losses and metrics consist of what is Keras's own and computes each row by itself.

    Parameters
    ----------
    model : built Keras model, with the losses that it is compiled with, if any.
    leaves : ``tf.TensorSpec`` of inputs, targets and sample weights, or None for one that is absent.
    has_rows : for each leaf whether its first axis is that of the samples; None if it is not known.
    losses : count the losses and metrics, too.

    Examples
    --------
    >>> import keras, tensorflow as tf
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    >>> prove(model, [tf.TensorSpec([None, 3])], [True]).proven
    True
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Lambda(lambda x: x - keras.ops.mean(x, 0))])
    >>> prove(model, [tf.TensorSpec([None, 3])], [True]).reasons[0].partition(":")[2]
    ' Lambda is not known to compute each row by itself'
    """
    layers = list(model._flatten_layers())
    reasons = [*_of_model(model, losses), *_of_data(model, leaves, has_rows)]
    for layer in layers:
        reasons += _of_layer(layer)
        reasons += _of_calls(layer) if isinstance(layer, Functional | keras.Sequential) else ()
    reasons += [*_of_losses(model), *_of_metrics(model, leaves)] if losses else ()
    mark = zlib.crc32(repr([_text(layer) for layer in layers]).encode())
    return Proof(tuple(dict.fromkeys(reasons)), any(map(_draws, layers)), mark)


def agreed_proof(
    channel: Channel,
    model: Any,
    leaves: Sequence[Any] | None,
    has_rows: Sequence[bool] | None = None,
    losses: bool = True,
    step: str = "train_step",
) -> Proof:
    """Return what is known of a model on all ranks, which have to have the same layers. *Collective*.

    Parameters
    ----------
    leaves : specs of the leaves of its batches, as for ``prove``; None: they are not known.
    has_rows : for each leaf whether its first axis is that of the samples; None: if it has an axis.
    losses : count the losses and metrics, too.
    step : its step, which has to be Keras's own.
    """
    if leaves is None:
        proof = Proof((f"{model.name}: input is not known beforehand",))
    elif step != "train_step" and own_method(model, step) is not None:
        proof = Proof((f"{model.name}: {step} is a method of the model's own",))
    else:
        known = [leaf is not None and bool(leaf.shape.rank) for leaf in leaves]
        proof = prove(model, leaves, known if has_rows is None else has_rows, losses)
    proven, marked = channel.host.same(np.array([proof.proven, proof.mark], np.int64))
    if proof.proven and not proven:
        return Proof((f"{model.name}: is not known to compute each row by itself on another rank",))
    if proof.proven and not marked:
        return Proof((f"{model.name}: has other layers on another rank",))
    return proof


def specs_of(spec: Any) -> list[Any]:
    """Return the leaves of the spec of a batch; None for an optional, which stands for None."""
    return [None if isinstance(leaf, tf.OptionalSpec) else leaf for leaf in tf.nest.flatten(spec)]


def own_method(model: Any, name: str) -> Any:
    """Return a method of a model that is not Keras's own, without the wrappers of this package; None if it is."""
    method = _unwrapped(getattr(model, name))
    return None if _is_method(model, name, method) and _of_keras(model, name) else method


def _of_model(model: Any, losses: bool) -> Iterator[str]:
    """Yield the methods of a model that are not Keras's own, and whether variables, or losses, are still to be made."""
    for name in STEP_METHODS:
        replaced = vars(model).get(name)
        if not _of_keras(model, name) or (replaced is not None and not _is_method(model, name, replaced)):
            yield f"{model.name}: {name} is a method of the model's own"
    if not _of_keras(model, "call"):
        yield f"{model.name}: call is a method of the model's own"
    elif not isinstance(model, Functional | keras.Sequential):
        yield f"{model.name}: {type(model).__name__} calls its layers in methods of its own"
    if model.run_eagerly:
        yield f"{model.name}: run_eagerly lets Python code run in every step"
    compiled = getattr(model, "_compile_loss", None)
    if not model.built:
        yield f"{model.name}: build has not run, so there are no variables yet"
    elif losses and compiled is not None and not compiled.built:
        yield f"{model.name}: its losses are built by its first step"


def _of_data(model: Any, leaves: Sequence[Any], has_rows: Sequence[bool | None]) -> Iterator[str]:
    """Yield the data without one row for each sample."""
    for leaf, known in zip(leaves, has_rows, strict=True):
        if leaf is not None and not (known and isinstance(leaf, tf.TensorSpec) and leaf.shape.rank):
            yield f"{model.name}: input may have no row for each sample: {leaf}"
    tensors = [*tensors_of(model, "inputs"), *tensors_of(model, "outputs")]
    if any(x.shape[0] is not None for x in tensors if len(x.shape)) or any(not len(x.shape) for x in tensors):
        yield f"{model.name}: input has a fixed number of rows"
    if any(len(x.shape) < 2 for x in tensors_of(model, "outputs")):
        yield f"{model.name}: output is a single number for each row"


def tensors_of(model: Any, name: str) -> list[Any]:
    """Return the symbolic inputs or outputs of a model; none if it has no graph."""
    try:
        return list(keras.tree.flatten(getattr(model, name)))
    except (AttributeError, ValueError):
        return []


def _of_layer(layer: Any) -> Iterator[str]:
    """Yield what is not known about a layer: its class, functions of the user's, axes, and states."""
    kind = type(layer)
    if not kind.__module__.startswith("keras.") or kind.__name__ not in LAYERS | INNER:
        if not isinstance(layer, keras.Model):  # for a model, see ``_of_model``
            yield f"{layer.name}: {kind.__name__} is not known to compute each row by itself"
        return
    for name, value in vars(layer).items():
        if name.endswith("activation"):
            if not _is_activation(value):
                yield f"{layer.name}: {name} is a function that may combine rows"
        elif any(not _is_known(x) for x in (value if isinstance(value, list | tuple) else [value])):
            yield f"{layer.name}: {name} is not Keras's own"
    if any(axis == 0 for name in _AXES for axis in _numbers(getattr(layer, name, ()))):
        yield f"{layer.name}: {kind.__name__} computes along the axis of the rows"
    if any(axis < -1 for name in _AXES for axis in _numbers(getattr(getattr(layer, "layer", None), name, ()))):
        yield f"{layer.name}: the layer within it may compute along the axis of the rows"
    if getattr(layer, "stateful", False) or (getattr(layer, "noise_shape", None) or (None,))[0] is not None:
        yield f"{layer.name}: {kind.__name__} has something in common for all rows"
    equation = getattr(layer, "equation", None)
    if equation is not None and not _keeps_rows(equation):
        yield f"{layer.name}: {equation} sums over the rows"
    if getattr(layer, "output_mode", "int") not in ("int", "one_hot"):
        yield f"{layer.name}: output_mode may count over the rows"


def _of_calls(model: Any) -> Iterator[str]:
    """Yield the calls in a graph of layers and operations that are not known to keep rows apart."""
    operations = model.operations if isinstance(model, Functional) else model.layers
    for operation in operations:
        kind = type(operation).__name__
        of_keras = type(operation).__module__.startswith("keras.") and kind in OPERATIONS | NEW_AXIS | REDUCING
        if not of_keras and not isinstance(operation, keras.layers.Layer):
            yield f"{operation.name}: {kind} is not known to compute each element by itself"
        ranks = [len(x.shape) for x in tensors_of(operation, "input")]
        axes = [axis for name in _AXES for axis in _numbers(getattr(operation, name, ()))]
        added = kind in NEW_AXIS
        if any(rank < 2 for rank in ranks) and kind not in OF_NUMBERS | INNER | OPERATIONS | NEW_AXIS:
            yield f"{operation.name}: {kind} gets a single number for each row"
        elif any(axis in (0, -rank - added) for axis in axes for rank in ranks) or (kind in REDUCING and not axes):
            yield f"{operation.name}: {kind} computes along the axis of the rows"
    if isinstance(model, Functional):
        known = all(type(x).__name__ in LAYERS | INNER | OPERATIONS | NEW_AXIS | REDUCING for x in operations)
        nodes = ((x, node) for x in model.get_config()["layers"] for node in x["inbound_nodes"]) if known else ()
        for config, node in nodes:
            if not _is_plain(node, config["class_name"] in INNER | {"BatchNormalization"}):
                yield f"{config['name']}: is called with constants or training=True"


def _is_plain(arguments: Any, by_phase: bool) -> bool:
    """Return whether the arguments of a call, in a configuration, are symbolic tensors and numbers alone.

    Parameters
    ----------
    by_phase : what is called combines rows in training, and must not be told to train.
    """
    if isinstance(arguments, dict):
        if "class_name" in arguments:
            return bool(arguments["class_name"] == "__keras_tensor__")
        if by_phase and arguments.get("training"):
            return False
        arguments = list(arguments.values())
    if isinstance(arguments, list | tuple):
        return all(_is_plain(argument, by_phase) for argument in arguments)
    return arguments is None or isinstance(arguments, int | float | str)


def _of_losses(model: Any) -> Iterator[str]:
    """Yield the losses that have no value for each row, or reductions that ranks do not weigh."""
    compiled = getattr(model, "_compile_loss", None)
    for entry in getattr(compiled, "_flat_losses", None) or ():
        loss = entry.loss
        loss = vars(loss).get("loss", loss) if type(loss).__module__.startswith("matex_data.") else loss
        function = getattr(loss, "fn", None)
        name = f"{getattr(function, '__name__', '')}".replace("_", "")
        known = type(loss).__name__ in LOSSES and type(loss).__module__.startswith("keras.")
        of_function = type(loss).__name__ == "LossFunctionWrapper" and f"{function.__module__}".startswith("keras.")
        if not known and not (of_function and name in {kind.lower() for kind in LOSSES}):
            yield f"{getattr(loss, 'name', loss)}: is a loss that is not known to have a value for each row"
        elif loss.reduction not in REDUCTIONS or is_along_rows(loss):
            yield f"{loss.name}: reduction={loss.reduction} is neither a mean nor a sum over the samples"


def _of_metrics(model: Any, leaves: Sequence[Any]) -> Iterator[str]:
    """Yield the metric functions whose value for a row may depend on others; see `custom_metrics`.

    Some of Keras's compare each output of shape (rows, 1) with all targets of shape (rows,).
    """
    for metric, function in custom_metrics(model):
        if function is not None:
            yield f"{metric.name}: is a metric function that may combine rows"
    if any(leaf is not None and leaf.shape.rank == 1 for leaf in leaves):
        for metric in flat_metrics(model.metrics):
            if getattr(getattr(metric, "_fn", None), "__name__", "") in BROADCASTING:
                yield f"{metric.name}: combines rows if targets have one axis, and outputs two"


def _is_activation(value: Any) -> bool:
    """Return whether a function is one of ``keras.activations``, or that of ``tf.nn`` with such a name."""
    if value is None or isinstance(value, str | keras.layers.Layer):
        return True
    module, name = f"{getattr(value, '__module__', '')}", f"{getattr(value, '__name__', '')}"
    known = module.startswith("tensorflow.") and hasattr(keras.activations, name)
    return known or module.startswith("keras.src.activations")


def _is_known(value: Any) -> bool:
    """Return whether an attribute of a layer is a value, a function or an object of Keras, TensorFlow or Python.

    A layer within it has reasons of its own.
    """
    if isinstance(value, keras.layers.Layer):
        return True
    is_function = isinstance(value, types.FunctionType | types.MethodType)
    module = value.__module__ if is_function else type(value).__module__
    return f"{module}".partition(".")[0] in _PACKAGES


def _numbers(value: Any) -> list[int]:
    return [x for x in keras.tree.flatten(value) if isinstance(x, int)]


def _keeps_rows(equation: str) -> bool:
    """Return whether an equation of ``einsum`` has the rows of its first operand first, and nowhere else.

    Examples
    --------
    >>> _keeps_rows("abc,cd->abd"), _keeps_rows("...a,ab->...b"), _keeps_rows("ab,ac->bc")
    (True, True, False)
    """
    operands, _, result = equation.replace(" ", "").partition("->")
    first, _, second = operands.partition(",")
    return first[:1] == result[:1] and (first[0] not in second or first.startswith("."))


def _text(layer: Any) -> Any:
    """Return what a layer is, but for its name. Loaded weights leave attributes that are False."""
    plain = {key: value for key, value in vars(layer).items() if isinstance(value, bool | int | float | str) and value}
    functions = [getattr(value, "__name__", "") for key, value in vars(layer).items() if key.endswith("activation")]
    weights = [(tuple(v.shape), v.dtype) for v in layer._trainable_variables]
    return (
        type(layer).__name__,
        {key: plain[key] for key in sorted(plain) if "name" not in key and "path" not in key},
        functions,
        weights,
    )


def _draws(layer: Any) -> bool:
    """Return whether a layer draws random numbers in training."""
    return any(getattr(layer, name, None) for name in _RATES)


def _is_method(model: Any, name: str, replaced: Any) -> bool:
    """Return whether an attribute is the method of the model's class, or wraps it for this package."""
    method = _unwrapped(replaced)
    return getattr(method, "__self__", None) is model and method.__func__ is getattr(type(model), name)


def _unwrapped(method: Any) -> Any:
    while type(method).__module__.startswith("matex_data."):
        method = method.wrapped
    return method


def _of_keras(model: Any, name: str) -> bool:
    return getattr(type(model), name, None) is getattr(_keras_class(model), name, None)


def _keras_class(model: Any) -> Any:
    """Return the class of Keras that a model is derived from."""
    return next(kind for kind in type(model).__mro__ if kind.__module__.partition(".")[0] == "keras")
