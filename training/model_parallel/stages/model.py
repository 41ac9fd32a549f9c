"""Context manager: train one compiled Keras model in stages."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from matex_data.errors import PartitionError
from matex_data.training.average.optimizer import GradientAverage
from matex_data.training.comm.channel import open_channel
from matex_data.training.comm.world import alone, check_not_alone
from matex_data.training.exact.attributes import kept_by_calls
from matex_data.training.exact.batch_norm import average_moving_statistics, batch_normalizations
from matex_data.training.exact.metrics import combine_states, note_reset, results_of_all
from matex_data.training.exact.state import Watch, step_state
from matex_data.training.exact.step import pad_batches
from matex_data.training.exact.variables import changing_variables, inner_optimizer, seeds
from matex_data.training.keras_api import pythonify_logs
from matex_data.training.model_parallel.deferred import initialize_absent, is_deferred, leave_to_others
from matex_data.training.model_parallel.graph import Container, ModelGraph, containers, model_graph
from matex_data.training.model_parallel.layouts.cut_model import CutLayers, another_mesh, layouts_of
from matex_data.training.model_parallel.layouts.plan import Plan, plans
from matex_data.training.model_parallel.layouts.ranks import ModelRanks
from matex_data.training.model_parallel.mesh import Mesh
from matex_data.training.model_parallel.stages.agreement import Agreement
from matex_data.training.model_parallel.stages.checks import (
    check_model,
    check_optimizer,
    check_stages,
    layers_of,
    replace_losses,
    replace_metrics,
    trained_stages,
    variable_holders,
)
from matex_data.training.model_parallel.stages.cut import (
    StagePlan,
    cut_after,
    cut_by_cost,
    estimated_costs,
    stage_plans,
)
from matex_data.training.model_parallel.stages.messages import Line
from matex_data.training.model_parallel.stages.micro_batches import Batch, Trial, default_micro_batches
from matex_data.training.model_parallel.stages.pipeline import PipelineStage
from matex_data.training.model_parallel.stages.stage import Edge, LastStage, Stage, StageLayers
from matex_data.training.model_parallel.stages.state import StagedState
from matex_data.training.model_parallel.stages.update import GradientSums, StageUpdate
from matex_data.training.partition.parts import (
    all_leave,
    as_whole,
    broadcast_in,
    empty_whole,
    hidden_wholes,
    hide_wholes,
    part_of,
    show_whole,
    whole_on_all,
    whole_shape,
)
from matex_data.training.reduction.graphs import eager_variable
from matex_data.training.reduction.ops import Reducer
from matex_data.training.reduction.rounding import WireDtype
from matex_data.training.replacements import Replacements, left_on_error, replaced
from matex_data.training.zero.optimizer import OwnedOptimizer, PartOptimizer, check_elementwise

log = logging.getLogger("matex_data.training")

STAGED = "_matex_staged"
"""Attribute of a model: the context in which it is trained, or whose stages have its weights."""
CUT = "_matex_cut"
"""Attribute of a deferred model: the number of its stages, and the calls after which these end."""
_LINEAR = (keras.optimizers.SGD,)
"""Optimizers whose updates by sparse gradients are those by their sums."""
MicroBatches = int | Literal["auto"] | None
"""Number of micro-batches; "auto": by the times of the first steps; None: by their rows."""


class StagedModel:
    """Context manager: ``fit``, ``evaluate`` and ``predict`` of one compiled Keras model run in stages.

    Entering replaces functions of this model; leaving restores them, but those that evaluate and predict a deferred
    model. Each rank trains the weights of its stage, of which alone it has gradients and a state of the optimizer; if
    the mesh has several ranks for each stage, its part of them.

    Parameters
    ----------
    micro_batches, recompute, split_after, sync_batch_norm, wire_dtype, shard_optimizer : as in ``fit``; see ``Trial``.

    Attributes
    ----------
    channel : replicas of this rank's part of the model, unless every rank has all weights.
    traces : 0, since Keras's own step is not traced.
    ranks : those that hold parts of the layers of this stage.
    samples_seen : variable with the number of samples of all ranks so far.
    deferred : each rank has the weights of its stage alone.
    watch : changes between steps; there are none that a check would have to find.
    """

    def __init__(
        self,
        model: Any,
        mesh: Mesh,
        *,
        micro_batches: MicroBatches = None,
        recompute: bool = False,
        split_after: Sequence[str] | None = None,
        sync_batch_norm: bool = False,
        wire_dtype: WireDtype | None = None,
        shard_optimizer: bool = False,
    ) -> None:
        self.model, self.mesh = model, mesh
        self.world, self.replicas, self.line = map(open_channel, (mesh.world, mesh.data, mesh.stages))
        self.line.counters = self.replicas.counters  # one sequence of all operations, as of ``ModelRanks``
        self.ranks = ModelRanks(mesh)
        self._cut_layers = CutLayers(Plan([], [], [], []), self.ranks)
        self._owns = shard_optimizer and self.replicas.size > 1
        self._micro_batches, self._recompute, self._split_after = micro_batches, recompute, split_after
        self._trial: Trial | None = None
        self._sync_batch_norm = sync_batch_norm
        self._reducer = Reducer(self.replicas, wire_dtype=wire_dtype)
        self._replacements = Replacements()
        self._optimizing = contextlib.ExitStack()
        self.deferred = any(map(is_deferred, model.weights))
        self.channel = self.replicas if self.deferred or self.ranks.size > 1 else self.world
        self._messages = Line(self.line)
        self._agreement = Agreement([self.world], self.replicas, self._messages, self.ranks)
        # Replicas may predict different numbers of batches: one of them is in no need of the others.
        self._of_replica = Agreement([self.line, self.ranks.channel], None, self._messages, self.ranks)
        self._logs: dict[str, Any] = {}
        self.samples_seen = eager_variable(0, tf.int64)
        self.traces = 0
        self._prepared = self._stepped = False
        self.watch = Watch(self)
        self.plans: list[StagePlan] = []

    @left_on_error
    def __enter__(self) -> StagedModel:
        before: StagedModel | None = vars(self.model).get(STAGED)
        if before is not None:
            before.release()
        self.world.communicator.agreed(self._check_options)
        self._replacements.set(self.model, "train_function", self._train_function)
        self._replacements.set(self.model, "test_function", self._test_function)
        self._replacements.set(self.model, "predict_function", self._predict_function)
        self._replacements.set(self.model, "_get_metrics_result_or_logs", self._epoch_logs)
        if self.channel is not self.world:
            self._replacements.set(self.model, STAGED, self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        # An interrupt may come while ranks join parts.
        with contextlib.nullcontext() if self._prepared and self.deferred else self._replacements:
            self._optimizing.__exit__(kind, error, trace)
            if self._prepared and self.deferred:
                self._replacements.set(self.model, "make_train_function", self._refuse_training)
            else:
                joined = all_leave(self.world, kind)
                if joined and self._prepared:
                    self.gather_weights()
                self.release(joined)

    def release(self, joined: bool = False) -> None:
        """Restore what entering has replaced; if ``joined``, parts of weights are whole again. *Collective* then."""
        self._replacements.restore()
        hide_wholes(self.model.weights)
        self._cut_layers.uninstall(self.model.optimizer, joined and not self.deferred)

    def prepare(self, element_spec: Any, whole_batches: bool = False) -> None:
        """Create the variables of the model, cut it, and broadcast the weights of rank 0. *Collective*.

        Raises
        ------
        PartitionError : on all ranks, if the model cannot be trained in stages.
        """
        self.world.communicator.agreed(lambda: self._cut(element_spec))
        own, held = self._plan, variable_holders(self.plans)
        if not self.deferred:
            self.broadcast()
        if self._micro_batches == "auto":
            self._trial = Trial(self.model, self.world, self.line.size, bool(changing_variables(self.layers)))
        self._cut_layers.install()
        if self.deferred:
            initialize_absent(v for layer in layers_of(own) for v in layer.variables)
            elsewhere = [v for v in self.model.weights if own.number not in held.get(id(v), (own.number,))]
            leave_to_others(elsewhere)  # also those that an evaluation before has initialized
            self.broadcast()
        own_ids = {id(v) for v in self.layers.trainable_variables}
        self.variables = [v for v in self.model.trainable_variables if id(v) in own_ids]
        self.world.communicator.agreed(lambda: check_optimizer(self.model.optimizer, self.variables))
        self._state = StagedState(self.model, self.layers, self.mesh, held)
        sums = self._sums = GradientSums(self.variables)
        trained = trained_stages(self.plans)
        self._take_optimizer(held, trained)
        reducer = None if self._owns else self._reducer
        state = step_state(self.replicas)
        self._update = StageUpdate(self.model.optimizer, sums, reducer, state, self.line, held, trained)
        if self._micro_batches != 1 or self.replicas.size > 1:
            self.world.communicator.agreed(lambda: replace_metrics(self.model, self._replacements))
        replace_losses(self.model, self._replacements, self._reducer, self._micro_batches != 1)
        positions = [self._graph.inputs.index(number) for number in own.inputs]
        last = own.number == len(self.plans) - 1
        self._pipeline = PipelineStage(self._messages, lambda receives: self._stage(receives, sums, last), positions)
        self._warn_of_micro_batches()
        self._prepared = True

    def _take_optimizer(self, held: Mapping[int, Sequence[int]], trained: Sequence[int]) -> None:
        """Build the optimizer, for the weights of this stage or the sections that this rank updates. *Collective*."""
        optimizer, totals, others = self.model.optimizer, self.ranks.totals(), Reducer(self.line)
        clipping: dict[str, Any] = {
            "others": others.total if len(trained) > 1 else None,
            "elsewhere": {v.path for v in self.variables if held[id(v)][0] != self.line.rank},
        }
        if optimizer.built or not self._owns:
            self._cut_layers.take_optimizer(optimizer, self.variables)
        if self._owns:
            average = GradientAverage(self._reducer)
            self._optimizing.enter_context(OwnedOptimizer(optimizer, self.variables, average, totals, **clipping))
            return
        self._optimizing.enter_context(PartOptimizer(optimizer, totals, **clipping))
        self._optimizing.enter_context(replaced(optimizer, finalize_variable_values=self._finalize))

    def batch_logs(self, logs: dict[str, Any], evaluated: bool = False) -> dict[str, Any]:
        """Return the logs of a batch of ``fit`` or of an evaluation over all replicas. *Collective*."""
        if self.replicas.size == 1 and not evaluated:
            return logs
        note_reset(self.model)  # replicas count their own rows alone, whatever a checkpoint or a fit before has noted
        return dict(self._of_last(lambda: results_of_all(self.replicas, self.model)))

    def pad_batches(self, dataset: Any) -> Any:
        """Append empty batches, so that this replica has as many batches as any other. *Collective*."""
        return pad_batches(self.world, dataset)[0]

    def broadcast(self) -> None:
        """Broadcast the variables of rank 0; those of which ranks hold parts from the first replica. *Collective*."""
        own = [v for layer in layers_of(self._plan) for v in [*layer.weights, *seeds(layer)]]
        parts = self.deferred or any(part_of(v) is not None for v in own)
        if self.world.communicator.maximum(int(parts))[0]:  # layouts may cut no weight of some stage
            broadcast_in(self.replicas, own)
        else:
            broadcast_in(self.world, [*self.model.weights, *seeds(self.model)])

    def state(self) -> StagedState:
        """Return the state of the model, for checkpoints."""
        return self._state

    def gather_weights(self) -> None:
        """Give every rank the weights and seeds of all stages, unless the model is deferred. *Collective*.

        Those of which a rank has a part are whole until the next step.
        """
        if self.deferred:
            return
        held = variable_holders(self.plans)
        for plan in self.plans:
            found = {id(v): v for layer in layers_of(plan) for v in [*layer.weights, *seeds(layer)]}
            own = [v for key, v in found.items() if held[key][0] == plan.number]
            if self.ranks.size == 1:
                broadcast_in(self.line, own, plan.number)
                continue
            for variable in own:
                mine = plan.number == self.line.rank
                value = whole_on_all(variable) if mine else empty_whole(variable)
                self.line.host.broadcast(value.reshape(-1), plan.number)
                if part_of(variable) is None:
                    variable.assign(value)
                else:
                    show_whole(variable, value)

    def _check_options(self) -> None:
        check_model(self.model, self._sync_batch_norm, self._micro_batches != 1)
        if "_matex_cut_model" in vars(self.model):
            raise another_mesh(self.mesh.shape)
        count = self._micro_batches
        if count not in (None, "auto") and not (isinstance(count, int) and count > 0):
            expected = 'micro_batches >= 1, or "auto"'
            raise PartitionError("a batch has no micro-batch", expected=expected, found=repr(count))

    def _cut(self, element_spec: Any) -> None:
        """Build the model without a state of the optimizer, and cut it."""
        parts = [v for v in self.model.variables if part_of(v) is not None]
        wholes = [(v, functools.partial(tf.zeros, whole_shape(v), v.dtype)) for v in parts]
        without_state = replaced(self.model, optimizer=None)  # Keras would build it for all weights
        with without_state, kept_by_calls(self.model), as_whole(wholes):
            self.model._symbolic_build(data_batch=element_spec)
        self._graph: ModelGraph = model_graph(self.model)
        self.deferred = any(map(is_deferred, self.model.weights))
        stages = self.line.size
        if self._split_after is None:
            ends = cut_by_cost(self._graph, estimated_costs(self._graph), stages)
        else:
            ends = cut_after(self._graph, self._split_after, stages)
        cut = vars(self.model).get(CUT)
        if self.deferred and cut is not None and cut != (stages, *ends):
            raise PartitionError(
                f"the deferred model {self.model.name} was trained in other stages, whose ranks have its weights",
                expected=f"{cut[0]} stages that end after calls {cut[1:]}",
                found=f"{stages} stages that end after calls {ends}",
                remedy="resume from its checkpoint with a new model, or train it on the same mesh",
            )
        self.plans = stage_plans(self._graph, ends)
        self._plan = self.plans[self.line.rank]
        check_stages(self.model, self.plans)
        held, number = variable_holders(self.plans), self._plan.number
        first = [v for layer in layers_of(self._plan) for v in layer.variables if held[id(v)][0] == number]
        outputs = self._graph.outputs if number == stages - 1 else self._plan.sends
        self.layers = StageLayers(self._plan, outputs, first, self.replicas.rank)
        if self.ranks.size > 1:
            self._cut_layers = self._planned_layers(element_spec)
        if self.deferred:
            object.__setattr__(self.model, CUT, (stages, *ends))

    def _planned_layers(self, element_spec: Any) -> CutLayers:
        """Return the layers of this stage, cut over its ranks. All ranks plan those of all stages, alike.

        Raises
        ------
        PartitionError : the layouts or the optimizer do not fit the model, or it is in parts on another mesh.
        """
        check_elementwise(self.model.optimizer)
        parts = [part for part in map(part_of, self.model.variables) if part is not None]
        if any(part.channel is not self.ranks.channel for part in parts):
            raise another_mesh(self.mesh.shape)
        groups: list[tuple[list[Any], list[Container]]] = []
        for stage in self.plans:
            inner = [x for layer in layers_of(stage) for x in layer._flatten_layers()]
            owner = self.layers if stage is self._plan else stage
            leaving = self._graph.outputs if stage is self.plans[-1] else stage.sends
            calls = [(call.operation, call.inputs, call.outputs) for call in stage.calls]
            groups.append((inner, [Container.linked(owner, calls, leaving), *containers(inner)]))
        planned = plans(self.model, groups, layouts_of(self.mesh), self.ranks, element_spec)
        found = CutLayers(planned[self._plan.number], self.ranks)
        if self.mesh.coordinates.replica == self.mesh.coordinates.part == 0:
            found.warn_of_gathered()
        return found

    def _stage(self, receives: Edge, sums: GradientSums, last: bool) -> Stage | LastStage:
        if not last:
            # TensorFlow's own backward function does not keep the operations of several ranks in one order.
            return Stage(self.model, self.layers, sums, receives, self._recompute or self.ranks.size > 1)
        structure = self._graph.functional.output
        return LastStage(self.model, self.layers, sums, receives, structure, step_state(self.replicas))

    def _train_function(self, iterator: Any) -> Any:
        """Run training steps, as Keras's function does. *Collective*."""
        hide_wholes(self.model.weights)
        for batch, rows in self._batches(iterator, self._agreement):
            with self._trial.step(batch.rows, rows) if self._trial else contextlib.nullcontext():
                self._agreement.step(functools.partial(self._accumulate, batch, rows))
                self._update()
            if not self._stepped:
                self._stepped = True
                self._warn_of_slices()
            self.samples_seen.assign_add(rows)
        return dict(self._logs)

    def _accumulate(self, batch: Batch, rows: int) -> None:
        self._prepare("train", batch)
        logs = self._pipeline.train(batch, self._count(batch), rows, self._metrics)
        self._logs = logs or self._logs

    def _test_function(self, iterator: Any) -> Any:
        """Evaluate batches, as Keras's function does. *Collective*."""
        check_not_alone("evaluate()")
        self._forward("test", iterator, self._agreement)
        return self._epoch_logs({}) if isinstance(iterator, Generator) else {}  # that of test_on_batch

    def _predict_function(self, data: Any) -> Any:
        """Return the predictions for a list of batches, as Keras's function does. *Collective*.

        Raises
        ------
        PartitionError : one rank alone calls it, and does not have all weights.
        """
        if alone.get():
            if self.channel is not self.world:
                check_not_alone("predict()")
            return _joined([self.model.predict_step(batch) for batch in data])
        found = self._forward("predict", iter(data), self._of_replica)
        return keras.tree.map_structure(tf.convert_to_tensor, self._of_last(lambda: _joined(found)))

    def _refuse_training(self, force: bool = False) -> None:
        """Raise ``PartitionError``, in place of ``make_train_function``."""
        raise PartitionError(
            f"the stages have the weights of the deferred model {self.model.name}, which Keras would train whole",
            expected="matex_data.training.fit(model, data, mesh=mesh), with the mesh of these stages",
            found="model.fit or train_on_batch",
            remedy="give matex_data.training.fit the mesh; or write the model with training.save, and load that",
        )

    def _forward(self, mode: str, iterator: Any, agreement: Agreement) -> list[Any]:
        """Evaluate or predict batches; return the predictions, on the last stage. *Collective*."""
        found: list[Any] = []

        def run(batch: Batch, rows: int) -> None:
            self._prepare(mode, batch)
            found.extend(self._pipeline.forward(mode, batch, self._count(batch), rows))

        with hidden_wholes(self.model.weights):  # a callback may evaluate before it reads them
            for batch, rows in self._batches(iterator, agreement):
                agreement.step(functools.partial(run, batch, rows))
        return found

    def _prepare(self, mode: str, batch: Batch) -> None:
        """Compare the batches of the ranks of this stage, and trace the computations once."""
        if self.ranks.size > 1:
            self.ranks.check_digest(batch.digest, self.ranks.channel.host)
        self._pipeline.prepare(mode, batch)

    def _batches(self, iterator: Any, agreement: Agreement) -> Iterator[tuple[Batch, int]]:
        """Yield the batches of one execution, each with the rows of all replicas that agree. *Collective*."""
        for step in range(self.model.steps_per_execution):
            batch, rows = agreement.next_batch(self._graph.functional, iterator)
            if batch is None:
                if step == 0:
                    # A generator cannot raise StopIteration.
                    raise tf.errors.OutOfRangeError(None, None, "the data has ended")
                return
            yield batch, rows

    def _count(self, batch: Batch) -> int:
        """Return the number of micro-batches of a batch."""
        given = self._trial.count if self._trial else self._micro_batches
        return int(given or default_micro_batches(batch.rows))

    def _metrics(self) -> dict[str, Any]:
        """Return the logs of this rank's rows, on the last stage."""
        return dict(pythonify_logs(self.model.get_metrics_result()))

    def _epoch_logs(self, logs: Any) -> Any:
        """Return the logs of an epoch or of an evaluation, over all replicas, on all stages. *Collective*."""
        average_moving_statistics(self.layers, self.replicas)
        if self._pipeline.last:
            combine_states(self.replicas, list(self.model.metrics_variables))
        return self._of_last(self._metrics)

    def _of_last(self, value: Callable[[], Any]) -> Any:
        """Return what a function returns on the last stage. *Collective*."""
        return self.line.host.allgather_object(value() if self._pipeline.last else None)[-1]

    def _finalize(self, variables: Any) -> None:
        """Let the optimizer set the final values of the weights of this stage, such as moving averages."""
        type(self.model.optimizer).finalize_variable_values(self.model.optimizer, self.variables)

    def _warn_of_slices(self) -> None:
        """Warn if an optimizer takes the sums of sparse gradients for other ones than one process. *Collective*."""
        inner = inner_optimizer(self.model.optimizer)
        clips = (inner.clipnorm, inner.global_clipnorm, inner.clipvalue) != (None,) * 3
        (differs,) = self.world.communicator.maximum(self._sums.of_slices and (clips or type(inner) not in _LINEAR))
        if differs and self.world.rank == 0:
            log.warning(
                "where several rows of a batch have the same index, stages add up the gradients of an Embedding before "
                "%s%s, and one process does not: weights differ from those of one process\n"
                "  remedy: train with SGD and without clipping, or without stages, where this matters",
                type(inner).__name__,
                " clips them" if type(inner) in _LINEAR else " sees them",
            )

    def _warn_of_micro_batches(self) -> None:
        if seeds(self.model) and (self._micro_batches != 1 or self.replicas.size > 1) and self.world.rank == 0:
            log.warning("random layers draw for each micro-batch by itself: other numbers than one process for a batch")
        normalizations = batch_normalizations(self.model)
        if normalizations and self.world.rank == 0:
            log.warning(
                "BatchNormalization (%s%s) normalizes each micro-batch, like one process that accumulates them",
                normalizations[0].name,
                f" and {len(normalizations) - 1} more" if len(normalizations) > 1 else "",
            )


def stages_of(model: Any) -> StagedModel | None:
    """Return the context whose stages have the weights of a model, and evaluate and predict it; None without one.

    Raises
    ------
    PartitionError : the stages have the weights, but compiling or a refused ``fit`` has ended the context.
    """
    found: StagedModel | None = vars(model).get(STAGED)
    is_open = found is not None and model.predict_function == found._predict_function
    if not is_open and (found is not None or CUT in vars(model)):
        raise PartitionError(
            f"no stages evaluate or predict the deferred model {model.name}, of which each has its weights",
            expected="the model as fit(mesh=mesh) has left it",
            found="compile(), or a fit that has failed, since then",
            remedy="train it with fit(mesh=mesh); or write it with training.save, and load that",
        )
    return found


def _joined(outputs: Sequence[Any]) -> Any:
    """Return the predictions of consecutive rows as one."""
    return keras.tree.map_structure(lambda *rows: np.concatenate([np.asarray(x) for x in rows]), *outputs)
