"""Step that changes nothing: its gradients, and what it would write and return, for one batch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from matex_data._types import Array
from matex_data.training.average.optimizer import attach_average
from matex_data.training.checking.decisions import Decisions
from matex_data.training.checking.draws import draws_for_rows
from matex_data.training.exact.attributes import kept_variables
from matex_data.training.exact.batch_norm import batch_normalizations
from matex_data.training.exact.listed import specs_of
from matex_data.training.exact.logs import flat
from matex_data.training.exact.metrics import numeric_states, own_numbers
from matex_data.training.exact.ownership import Ownership
from matex_data.training.exact.rows import batch_size, rank_bounds
from matex_data.training.exact.step import RankStep
from matex_data.training.exact.variables import optimizer_variables, optimizers, replicated_variables
from matex_data.training.keras_api import ControlFlowGraph
from matex_data.training.reduction.ops import REDUCED
from matex_data.training.replacements import Replacements

if TYPE_CHECKING:
    from matex_data.training.distributed_model import DistributedModel


HIDDEN_STATE = (
    *("LookupTableInsert", "LookupTableRemove", "LookupTableImport", "Queue", "Stack", "Barrier", "Stage", "Unstage"),
    *("MapStage", "MapUnstage", "OrderedMap", "IteratorGetNext"),
)
"""Beginnings of the types of operations that change state outside of variables."""
GRADIENTS = "gradient"
"""Beginning of the names of gradients among effects."""
METRICS = "state of metrics "
"""Beginning of the names of states of metrics among effects, before their number."""
RECORDED = "matex_recorded"
"""Name of the operations by which a probe records gradients."""


class NotCheckable(Exception):
    """A step cannot be checked; the message says why, as a clause."""


@dataclass(frozen=True)
class Effects:
    """Effects that a step would have.

    Attributes
    ----------
    arrays : by name: gradients that optimizers get, and the values that the step leaves in other variables. float32 or
        float64; None for a gradient that is None.
    logs : numbers that the step returns beside results of metrics, by key.
    rows : rows that it was computed from.
    metrics : changes of variables of metrics, by their position among those of numbers.
    resolutions : by name of a change: units in the last place of the variable, as a norm.
    """

    arrays: dict[str, Array | None] = field(default_factory=dict)
    metrics: dict[int, Array] = field(default_factory=dict)
    logs: dict[str, float] = field(default_factory=dict)
    rows: int = 0
    resolutions: dict[str, float] = field(default_factory=dict)

    def named(self, metrics: Mapping[int, Array] | None = None) -> dict[str, Array | None]:
        """Return all arrays by name, also the changes of metrics: those of this step, or others in place of them."""
        changes = self.metrics if metrics is None else metrics
        return {**self.arrays, **{f"{METRICS}{i + 1}": change for i, change in changes.items()}}


class Probe:
    """Traced step whose effects are undone.

    Parameters
    ----------
    whole : compute it on the whole batch, without the other ranks; otherwise on this rank's rows: *collective*.

    Attributes
    ----------
    traced : ``trace`` has succeeded.
    draws : the step draws random numbers.
    read : variables that the step reads and does not write, beside those of optimizers and metrics.
    decisions : what the step decides by variables alone; of a step on the whole batch.
    """

    def __init__(self, distributed: DistributedModel, step: RankStep, spec: Any, whole: bool) -> None:
        self._distributed, self._checked, self._whole = distributed, step, whole
        self._structure = spec
        leaves = specs_of(spec)
        self._kept = [leaf is not None for leaf in leaves]
        self._signature = [leaf for leaf in leaves if leaf is not None]
        self._recorded: dict[str, Array | None] = {}
        self._applied: list[Any] = []
        self._calls = 0
        self._conditional = False
        self._numbers: dict[str, Any] = {}
        self._computed: set[str] = set()  # keys of numbers that the step computes from states of metrics
        self.traced = self.draws = False
        self.read: list[Any] = []

    def trace(self) -> None:
        """Trace the step; raise ``NotCheckable`` if it writes or applies what this rank computes from its own rows."""
        function = tf.function(self._step, input_signature=self._signature, autograph=False)
        nested = tf.config.functions_run_eagerly()
        tf.config.run_functions_eagerly(True)  # functions that the step calls become operations of its own graph
        try:
            self._function = function.get_concrete_function()
        finally:
            tf.config.run_functions_eagerly(nested)
        self._find_variables()
        self.traced = True

    def run(self, batch: Any) -> Effects:
        """Return the effects of the step for a batch. *Collective* unless the batch is whole."""
        leaves = [leaf for leaf, kept in zip(tf.nest.flatten(batch), self._kept, strict=True) if kept]
        metrics = resources(numeric_states(self._distributed.model))
        self._recorded.clear()
        with kept_variables(self._restored) as before:
            old = {id(v.handle): value.numpy() for v, value in zip(self._restored, before, strict=True)}
            self._prepare_loss_scales()
            rows, returned = self._function(*leaves)
            found: dict[str, Array | None] = dict(self._recorded)
            self._recorded.clear()
            for name, variable in self._compared.items():
                new = np.array(variable.read_value().numpy())
                found[name] = new - old[id(variable.handle)] if variable.trainable else new
            states = {i: v.numpy() - old[id(v.handle)] for i, v in enumerate(metrics) if id(v.handle) in old}
            changed = {name: v for name, v in self._compared.items() if v.trainable}
            changed |= {f"{METRICS}{i + 1}": metrics[i] for i in states}
            resolutions = {name: _resolution(v) for name, v in changed.items()}
            logs = own_numbers(self._distributed.model, returned, self._computed)
        numbers = {key: float(value) for key, value in logs.items()}
        return Effects(found, states, numbers, int(rows), resolutions)

    def _step(self, *tensors: Any) -> tuple[Any, dict[str, Any]]:
        self._calls, self._applied, self._conditional = 0, [], False
        channel = self._distributed.channel
        remaining = iter(tensors)
        data = tf.nest.pack_sequence_as(self._structure, [next(remaining) if kept else None for kept in self._kept])
        total = batch_size(data)
        whole = (tf.constant(0), tf.cast(total, tf.int32))
        rows = whole if self._whole else rank_bounds(whole[1], channel.rank, channel.size)
        with draws_for_rows(rows, whole[1]) as drawn, self._captured():
            logs = (self._checked.on_whole_batch if self._whole else self._checked.on_rows)(data)
        self.draws = drawn()
        self._numbers = {key: tensor for key, value in flat(logs).items() if _is_number(tensor := _tensor(value))}
        return rows[1] - rows[0], self._numbers

    @contextlib.contextmanager
    def _captured(self) -> Iterator[None]:
        """Context manager: record the gradients that optimizers get, averaged or local, instead of applying them."""
        with Replacements() as replacements:
            for optimizer in optimizers(self._distributed.model):
                replacements.set(optimizer, "apply", self._record)
                if not self._whole:
                    attach_average(optimizer, self._distributed.average)
                    averaging = optimizer.apply

                    def noting(grads: Any, variables: Any = None, averaging: Any = averaging) -> Any:
                        self._note(grads)
                        return averaging(grads, variables)

                    replacements.set(optimizer, "apply", noting)
            yield

    def _note(self, gradients: Sequence[Any]) -> None:
        self._applied += [tf.convert_to_tensor(g) for g in gradients if g is not None]

    def _record(self, gradients: Any, variables: Any = None) -> None:
        """Record gradients in place of applying them."""
        self._conditional |= isinstance(tf.compat.v1.get_default_graph(), ControlFlowGraph)
        gradients = list(gradients)
        paths = [getattr(v, "path", getattr(v, "name", "")) for v in variables or []] or [""] * len(gradients)
        call, self._calls = self._calls, self._calls + 1
        names = [f"{GRADIENTS} of {path}" + (f" in update {call + 1}" if call else "") for path in paths]
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is None:
                self._recorded.setdefault(name, None)
        given = [(name, g) for name, g in zip(names, gradients, strict=True) if g is not None]
        if given:
            # TensorFlow keeps the function as long as the program runs, but not the model.
            keep = functools.partial(_keep, self._recorded, [name for name, _ in given])
            tf.numpy_function(keep, [tf.convert_to_tensor(g) for _, g in given], [], name=RECORDED)

    def _find_variables(self) -> None:
        """Find what the traced step reads and writes; raise ``NotCheckable`` as ``trace`` does."""
        if self._conditional and not self._whole:
            raise NotCheckable("it decides within tf.cond or tf.while_loop whether it updates the weights")
        model, graph = self._distributed.model, self._function.graph
        if self._whole:
            refuse_hidden_state(graph)
        outside = {id(inner): outer for outer, inner in graph.captures}
        metrics = {id(v.handle) for v in resources(numeric_states(model))}
        of_metrics = Ownership(graph, [inner for outer, inner in graph.captures if id(outer) in metrics])
        self._computed = {key for key, tensor in self._numbers.items() if of_metrics.of(tensor).rows}
        ownership = Ownership(graph, [tensor for tensor in self._function.inputs if id(tensor) not in outside])
        paths = {id(v.value.handle): v.path for v in model.variables}
        states = {id(v.handle) for v in resources([*model.metrics_variables, *optimizer_variables(model)])}
        ours = {id(v.handle) for v in self._distributed.own_variables()}
        counters = {id(v.handle) for v in self._distributed.channel.counting_variables()}
        variables = {id(v.handle): v for v in resources([*model.variables, *model.metrics_variables, *graph.variables])}
        variables |= {id(v.handle): v for v in resources(optimizer_variables(model))}
        written: set[int] = {id(outside[id(t)]) for t in ownership.guarded() if id(t) in outside}
        compared, own = set[int](), set[int]()
        for tensor, source in ownership.writes():
            key = id(outside.get(id(tensor)))
            if key in variables and key not in counters:
                written.add(key)
                compared |= {key} - states - ours
                own |= {key} if source.rows else set()
        self._restored = [v for key, v in variables.items() if key in written]
        scales = resources([o.dynamic_scale for o in optimizers(model) if hasattr(o, "dynamic_scale")])
        self._restored += [v for v in scales if id(v.handle) not in written]
        self._compared = {
            f"value of {paths.get(key, v.name.partition(':')[0])}": v for key, v in variables.items() if key in compared
        }
        if not self._whole:
            self._refuse(ownership, [name for name, v in self._compared.items() if id(v.handle) in own])
        read = {id(v.handle) for v in graph.variables} - written - states - ours - counters
        self.read = [v for key, v in variables.items() if key in read and not v.trainable]
        if self._whole:
            alike = {id(v.handle) for v in resources(replicated_variables(model))}
            moving = [v for layer in batch_normalizations(model) for v in layer.non_trainable_variables]
            alike -= {id(v.handle) for v in resources(moving)}
            own_inputs = [tensor for tensor in self._function.inputs if id(outside.get(id(tensor))) not in alike]
            self.decisions = Decisions(graph, own_inputs, list(variables.values()))

    def _refuse(self, ownership: Ownership, own: list[str]) -> None:
        """Raise an error if the step writes or applies what this rank computes from its own rows."""
        if own:
            raise NotCheckable(f"it computes the {' and the '.join(sorted(own))} from the rows of the batch")
        if any(source.rows and source.averages for source in map(ownership.of, self._applied)):
            raise NotCheckable("it changes gradients by a number that it computes from the rows of the batch")

    def _prepare_loss_scales(self) -> None:
        """Set the loss scale of mixed precision to one: the scaled loss of a first step often overflows."""
        for optimizer in optimizers(self._distributed.model):
            if hasattr(optimizer, "dynamic_scale"):
                optimizer.dynamic_scale.assign(1.0)


def _keep(recorded: dict[str, Array | None], names: Sequence[str], *arrays: Array) -> None:
    """Add gradients to those that have been recorded."""
    for name, array in zip(names, arrays, strict=True):
        before = recorded.get(name)
        recorded[name] = np.array(array, np.float32 if array.itemsize < 8 else np.float64)
        if before is not None:
            recorded[name] += before


def refuse_eager(model: Any) -> None:
    """Raise ``NotCheckable`` if Python code of a model runs whenever a step does."""
    if model.run_eagerly or tf.config.functions_run_eagerly():
        raise NotCheckable("its Python code runs in every step (run_eagerly), so that a check would run it once more")


def refuse_hidden_state(graph: Any) -> None:
    """Raise ``NotCheckable`` if a step has state that cannot be put back, such as that of Python code."""
    definition = graph.as_graph_def()
    for node in (*definition.node, *(node for function in definition.library.function for node in function.node_def)):
        if node.op in ("PyFunc", "EagerPyFunc") and not any(name in node.name for name in (RECORDED, REDUCED)):
            raise NotCheckable(
                f"it calls Python code, which may keep state ({node.name}); if it keeps none, say so by "
                "tf.numpy_function(..., stateful=False)"
            )
        if node.op.startswith("Rng"):
            raise NotCheckable(
                f"it draws from a tf.random.Generator, whose numbers would be the same on each rank ({node.name}); "
                "draw with a keras.random.SeedGenerator that is an attribute of the layer or model"
            )
        if node.op.startswith(HIDDEN_STATE):
            raise NotCheckable(f"it changes a table or a queue, which is no variable ({node.name})")


def _resolution(variable: Any) -> float:
    """Return the norm of the units in the last place of a variable: by so much its change is rounded."""
    if not variable.dtype.is_floating:
        return 0.0
    return float(np.spacing(variable.dtype.as_numpy_dtype(1))) * float(np.linalg.norm(variable.numpy().astype("f8")))


def _tensor(value: Any) -> Any:
    """Return numbers and variables as tensors, as TensorFlow does when a step returns them, and others unchanged."""
    return tf.convert_to_tensor(value) if isinstance(value, int | float | np.number | keras.Variable) else value


def _is_number(value: Any) -> bool:
    return tf.is_tensor(value) and value.shape.rank == 0 and bool(value.dtype.is_floating or value.dtype.is_integer)


def resources(variables: Sequence[Any]) -> list[Any]:
    """Return the variables of TensorFlow that Keras's variables hold; others as they are."""
    return [v.value if isinstance(v, keras.Variable) else v for v in variables]
