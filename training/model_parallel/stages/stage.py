"""Stage: its layers as one layer of Keras, and its computations for a micro-batch, each compiled once for all sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from matex_data.training.exact.losses import DistributedLoss, unknown_losses
from matex_data.training.exact.metrics import weighted_means
from matex_data.training.exact.state import StepState
from matex_data.training.exact.variables import changing_variables, separate_draws
from matex_data.training.keras_api import get_keras_mask, set_keras_mask
from matex_data.training.model_parallel.stages.checks import find_sums, layers_of
from matex_data.training.model_parallel.stages.cut import StagePlan
from matex_data.training.model_parallel.stages.update import GradientSums


class StageLayers(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Layers of a stage, which share their variables with the model.

    Parameters
    ----------
    outputs : numbers of the tensors to return: those that the stage sends, or the outputs of the model.
    regularized : variables whose regularizers count here: those that no stage before this one has.
    replica : number of the replica, each of which draws its own random numbers.
    """

    def __init__(self, plan: StagePlan, outputs: Sequence[int], regularized: Sequence[Any], replica: int) -> None:
        super().__init__(name=f"stage{plan.number}", autocast=False)
        self._matex_plan, self._matex_outputs, self._matex_replica = plan, tuple(outputs), replica
        self._matex_regularized = {id(variable) for variable in regularized}
        self.layers = layers_of(plan)
        self._matex_masked: tuple[int, ...] = ()
        self.loss_dtype = tf.float64 if keras.config.floatx() == "float64" else tf.float32
        self.built = True

    def set_masked(self, positions: Sequence[int]) -> None:
        """Set the positions of the received tensors that have masks."""
        object.__setattr__(self, "_matex_masked", tuple(positions))

    def call(self, tensors: Sequence[Any], training: bool = False) -> tuple[list[Any], list[Any]]:
        """Return the outputs, and their masks, which may be None.

        Parameters
        ----------
        tensors : the inputs of the model that the stage takes, the tensors that it receives, and masks of these.
        """
        plan = self._matex_plan
        numbers = (*plan.inputs, *plan.receives)
        values = dict(zip(numbers, tensors, strict=False))
        for position, mask in zip(self._matex_masked, tensors[len(numbers) :], strict=True):
            set_keras_mask(values[plan.receives[position]], mask)
        with separate_draws(self._matex_replica):
            for call in plan.calls:
                call.run(values, training)
        outputs = [values[number] for number in self._matex_outputs]
        return outputs, [get_keras_mask(output) for output in outputs]

    def own_loss(self) -> Any:
        """Return the sum of the losses that the latest call has added, and of regularizers."""
        losses = [loss for layer in self._flatten_layers() for loss in layer._get_own_losses()]
        regularized = [v for v in self.trainable_weights if id(v) in self._matex_regularized]
        losses += [v.regularizer(v) for v in regularized if v.regularizer is not None]
        return sum((tf.reduce_sum(tf.cast(loss, self.loss_dtype)) for loss in losses), tf.zeros((), self.loss_dtype))


class Edge(NamedTuple):
    """Tensors that go from a stage to the next one.

    Attributes
    ----------
    specs : of each tensor; those of masks are the last ones.
    masked : positions of the tensors that have masks.
    """

    specs: tuple[tf.TensorSpec, ...] = ()
    masked: tuple[int, ...] = ()

    @property
    def differentiable(self) -> list[int]:
        """Return the positions of the tensors for which errors come back."""
        return [i for i, spec in enumerate(self.specs) if keras.backend.is_float_dtype(spec.dtype.name)]


class Pending(NamedTuple):
    """Results of the forward computation of a micro-batch that its backward computation needs.

    Attributes
    ----------
    tensors : what the stage has taken.
    own_loss : loss that its layers have added, a scalar.
    tape : tape that has recorded these; None if they are to be computed again.
    state : values that variables had before, if they are to be computed again.
    """

    tensors: list[Any]
    outputs: list[Any]
    own_loss: Any
    tape: Any
    state: list[Any]


class Stage:
    """Computations of a stage before the last one.

    From the forward to the backward computation it keeps the results of its operations, in a tape. To save this memory
    it can keep its inputs alone, and compute forward twice; seeds and moving statistics change once in any case.

    Parameters
    ----------
    sums : sums of the gradients of their weights.
    receives : tensors that the stage receives.
    recompute : compute forward twice.
    """

    def __init__(self, model: Any, layers: StageLayers, sums: GradientSums, receives: Edge, recompute: bool) -> None:
        self.model, self.layers, self.sums, self.receives = model, layers, sums, receives
        self._recompute = recompute
        layers.set_masked(receives.masked)
        self._changing = changing_variables(layers) if recompute else []

    def compile_forward(self, inputs: Sequence[tf.TensorSpec], training: bool) -> Edge:
        """Trace the computations; return the tensors that the stage sends."""
        given = [*inputs, *self.receives.specs]
        masked: list[int] = []

        def forward(tensors: list[Any]) -> Any:
            state = [tf.identity(v.value) for v in self._changing] if training else []
            outputs, masks = self.layers(tensors, training=training)
            masked[:] = [i for i, mask in enumerate(masks) if mask is not None]
            outputs = [tf.convert_to_tensor(x) for x in (*outputs, *(masks[i] for i in masked))]
            return outputs, self.layers.own_loss(), state

        self._forward = compiled(forward, given)
        outputs, _, state = self._forward.structured_outputs
        sends = Edge(tuple(tf.TensorSpec(x.shape, x.dtype) for x in outputs), tuple(masked))
        self._add = tf.function(self.sums.add, autograph=False, reduce_retracing=True)
        self._differentiable = sends.differentiable
        if training and self._recompute:
            errors = [sends.specs[i] for i in sends.differentiable]
            weight = tf.TensorSpec((), self.layers.loss_dtype)
            self._again = compiled(self._backward, given, list(state), errors, weight)
        return sends

    def forward(self, tensors: list[Any], training: bool) -> Pending:
        """Compute forward, and keep what the backward computation needs, if there is one."""
        if not training or self._recompute:
            outputs, own_loss, state = self._forward(tensors)
            return Pending(tensors, outputs, own_loss, None, state)
        with tf.GradientTape() as tape:
            tape.watch(differentiable(tensors, self.receives))
            outputs, own_loss, _ = self._forward(tensors)
        return Pending(tensors, outputs, own_loss, tape, [])

    def backward(self, pending: Pending, errors: list[Any], weight: float) -> list[Any]:
        """Add the gradients of a micro-batch to the sums; return the errors of the tensors that the stage received.

        Parameters
        ----------
        errors : derivatives of the weighted loss with respect to the tensors sent.
        weight : of the loss that the layers have added.
        """
        dtype = self.layers.loss_dtype
        scaled = tf.cast(self.model.optimizer.scale_loss(tf.constant(weight, dtype)), dtype)
        if pending.tape is None:
            return list(self._again(pending.tensors, pending.state, errors, scaled))
        targets = [*(pending.outputs[i] for i in self._differentiable), pending.own_loss]
        gradients, own_errors = self._gradients(pending.tape, targets, pending.tensors, [*errors, scaled])
        self._add(gradients)
        return list(own_errors)

    def _backward(self, tensors: list[Any], state: list[Any], errors: list[Any], weight: Any) -> list[Any]:
        """Compute forward again, as with the variables before, and backward."""
        mapping = list(zip(self._changing, state, strict=True))
        with keras.StatelessScope(mapping, collect_losses=True, initialize_variables=False), tf.GradientTape() as tape:
            tape.watch(differentiable(tensors, self.receives))
            outputs, _ = self.layers(tensors, training=True)
            targets = [*(outputs[i] for i in self._differentiable if i < len(outputs)), self.layers.own_loss()]
        gradients, own_errors = self._gradients(tape, targets, tensors, [*errors, weight])
        self.sums.add(gradients)
        return list(own_errors)

    def _gradients(self, tape: Any, targets: list[Any], tensors: list[Any], errors: list[Any]) -> tuple[Any, Any]:
        watched = differentiable(tensors, self.receives)
        weights = [v.value for v in self.sums.variables]
        gradients, own_errors = tape.gradient(targets, [weights, watched], output_gradients=errors)
        return gradients, _dense(own_errors, watched)


class LastStage:
    """Computations of the last stage, which computes forward, loss and backward of a micro-batch in one.

    Parameters
    ----------
    structure : nested structure of the outputs of the model.
    """

    def __init__(
        self, model: Any, layers: StageLayers, sums: GradientSums, receives: Edge, structure: Any, state: StepState
    ) -> None:
        self.model, self.layers, self.sums, self.receives = model, layers, sums, receives
        self._structure, self._state = structure, state
        self._unknown: list[DistributedLoss] = []
        layers.set_masked(receives.masked)

    def compile_step(self, inputs: Sequence[tf.TensorSpec], targets: Any, training: bool) -> None:
        """Trace the step of a micro-batch.

        Parameters
        ----------
        inputs : specs of the inputs of the model that the stage takes.
        targets : specs of targets and sample weights, nested.
        """

        def step(tensors: list[Any], targets: Any, weight: Any, rows: Any, loss_before: Any) -> Any:
            with self._state.step(weight), weighted_means(self.model, weight):
                if training:
                    return self._train(tensors, targets, weight, rows, loss_before)
                self._loss(tensors, targets, rows, loss_before, training=False)
                return []

        scalars = [tf.TensorSpec((), dtype) for dtype in (tf.float64, tf.int64, self.layers.loss_dtype)]
        given = [*inputs, *self.receives.specs]
        self._compile = functools.partial(compiled, step, given, targets, *scalars)
        self._step = self._compile()
        self._unknown = unknown_losses(self.model)
        if self._unknown:
            self.compile_predict(inputs)

    def step(self, tensors: list[Any], targets: Any, weight: Any, rows: Any, loss_before: Any) -> Any:
        """Run the step of a micro-batch."""
        if self._unknown and weight < 1:
            self._find_sums(tensors, targets, int(rows))
        return self._step(tensors, targets, weight, rows, loss_before)

    def _find_sums(self, tensors: list[Any], targets: Any, rows: int) -> None:
        y, sample_weight = targets
        with keras.StatelessScope():  # metrics stay as they are
            self.model._compile_loss(y, self.predict(tensors))
        find_sums(self._unknown, rows, any(x is not None for x in tf.nest.flatten(sample_weight)))
        left = [loss for loss in self._unknown if loss.sums is None]
        if len(left) < len(self._unknown):
            self._step, self._unknown = self._compile(), left

    def compile_predict(self, inputs: Sequence[tf.TensorSpec]) -> None:
        """Trace the prediction of a micro-batch."""
        given = [*inputs, *self.receives.specs]
        self.predict = compiled(lambda tensors: self._predict(tensors, training=False), given)

    def _train(self, tensors: list[Any], targets: Any, weight: Any, rows: Any, loss_before: Any) -> list[Any]:
        """Add the gradients of a micro-batch; return the errors of the tensors that the stage received."""
        with tf.GradientTape() as tape:
            watched = differentiable(tensors, self.receives)
            tape.watch(watched)
            loss = self._loss(tensors, targets, rows, loss_before, training=True)
            total = tf.reduce_sum(loss) if loss.shape.rank else loss * tf.cast(weight, loss.dtype)
            scaled = self.model.optimizer.scale_loss(total)
        gradients, errors = tape.gradient(scaled, [[v.value for v in self.sums.variables], watched])
        self.sums.add(gradients)
        return _dense(errors, watched)

    def _loss(self, tensors: list[Any], targets: Any, rows: Any, loss_before: Any, training: bool) -> Any:
        """Return the loss of a micro-batch, or without a reduction that of each row, and update the metrics."""
        y, sample_weight = targets
        predictions = self._predict(tensors, training)
        own = self.layers.own_loss()
        loss = self.model._compile_loss(y, predictions, sample_weight) if self.model._compile_loss else None
        loss = own if loss is None else loss + tf.cast(own, loss.dtype)
        mean = tf.reduce_mean(loss) + tf.cast(loss_before, loss.dtype)
        self.model._loss_tracker.update_state(mean, sample_weight=rows)
        self.model.compute_metrics(None, y, predictions, sample_weight)
        return loss

    def _predict(self, tensors: list[Any], training: bool) -> Any:
        outputs, _ = self.layers(tensors, training=training)
        packed = keras.tree.pack_sequence_as(self._structure, outputs)
        return packed[0] if isinstance(packed, list | tuple) and len(packed) == 1 else packed


def compiled(function: Callable[..., Any], *specs: Any) -> Any:
    """Return a function of tensors, traced for these specs."""
    return tf.function(function, autograph=False).get_concrete_function(*specs)


def map_tensors(function: Callable[[Any], Any], nested: Any) -> Any:
    """Return nested tensors with the results of a function in place of them; None stays None."""
    return tf.nest.map_structure(lambda leaf: None if leaf is None else function(leaf), nested)


def differentiable(tensors: Sequence[Any], receives: Edge) -> list[Any]:
    """Return the tensors of a stage whose errors it sends back; those that it receives are the last ones."""
    first = len(tensors) - len(receives.specs)
    return [tensors[first + i] for i in receives.differentiable]


def _dense(errors: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
    """Return errors as dense tensors, zero where the loss does not depend on a tensor."""
    pairs = zip(errors, tensors, strict=True)
    return [tf.zeros_like(tensor) if error is None else tf.convert_to_tensor(error) for error, tensor in pairs]
