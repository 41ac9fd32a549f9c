"""Context manager: train one compiled Keras model data-parallel."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import keras

from matex_data.training.average.optimizer import (
    GradientAverage,
    GradientPatches,
    accumulates,
    attach_average,
    detach_average,
    is_distributed,
)
from matex_data.training.comm.channel import Channel
from matex_data.training.comm.runtime import Choice
from matex_data.training.exact.batch_norm import (
    ACCUMULATED,
    GlobalMoments,
    average_moving_statistics,
    batch_normalizations,
    local_normalizations,
)
from matex_data.training.exact.listed import own_method
from matex_data.training.exact.losses import DistributedLoss, SummedLoss, distributed_losses, is_unreduced
from matex_data.training.exact.metrics import (
    combine_metrics,
    combined_logs,
    gathering_flags,
    note_reset,
    replace_custom_metrics,
    results_of_all,
)
from matex_data.training.exact.preprocessing import check_preprocessing
from matex_data.training.exact.rows import leaves_per_sample, static_rows
from matex_data.training.exact.state import Watch
from matex_data.training.exact.step import DistributedStep, DistributedTestStep
from matex_data.training.exact.variables import (
    assignments_of_build,
    build,
    build_losses,
    build_without_optimizer,
    inner_optimizer,
    optimizer_variables,
    optimizers,
    replicated_variables,
    replicated_weights,
    seeds,
)
from matex_data.training.partition.parts import broadcast_in
from matex_data.training.reduction.graphs import disable_xla
from matex_data.training.reduction.ops import Reducer
from matex_data.training.reduction.rounding import WireDtype
from matex_data.training.replacements import Replacements, left_on_error, replaced
from matex_data.training.zero.optimizer import OwnedOptimizer, Totals

log = logging.getLogger("matex_data.training")

LOGS = ("compute_metrics", "get_metrics_result")
"""Methods of Keras's models that make logs of metrics."""
CONTEXT = "_matex_context"
"""Attribute of a model: the context that is open."""
BY_LAUNCHER = "_matex_distributed"
"""Attribute of a model: the context that ``matex run`` has opened, and leaves open."""
UNMERGED = "_matex_unmerged"
"""Attribute of a model: in the context that was left last, steps came after the latest epoch that has ended."""
LATEST = "_matex_latest_context"
"""Attribute of a model: the context of its latest training, whose traced functions the next one may use."""


class DistributedModel:
    """Context manager: ``fit`` and ``evaluate`` of one compiled Keras model run data-parallel.

    Entering replaces methods of this model; leaving restores them. Both, and ``prepare``, are *collective*.

    Parameters
    ----------
    sync_batch_norm : use the statistics of the global batch in all ``BatchNormalization`` layers; otherwise only in
        those with ``synchronized=True``.
    reducer : averages gradients; None: a new one with the default strategy.
    world : all ranks that train the model, if each replica consists of several; None: those of ``channel``.

    Attributes
    ----------
    average : average of its gradients over the ranks.
    step : replacement for ``train_step``.
    test : replacement for ``test_step``.
    watch : changes between steps, after which a self-check is due.
    replacements : what entering, and checks, have replaced.
    checks : self-checks of the model, by kind and mode.
    """

    def __init__(
        self,
        model: Any,
        channel: Channel,
        sync_batch_norm: bool = False,
        reducer: Reducer | None = None,
        world: Channel | None = None,
    ) -> None:
        self.model = model
        self.channel = channel
        self.world = world or channel
        self._reducer = reducer or Reducer(channel)
        self.average = GradientAverage(self._reducer)
        self._own_step = type(model).train_step is not keras.Model.train_step
        self._owns = self._waits = False
        self.step = DistributedStep(model, GradientPatches(self.average, self._averages_early), channel)
        self._sync_batch_norm = sync_batch_norm
        self._compiled = model._loss_tracker
        self.prepared = False
        self._merged = 0  # samples after which the states of the ranks were merged
        self.watch = Watch(self.step)
        self._warned: set[str] = set()
        self._losses: list[DistributedLoss] | None = None
        self.replacements = Replacements()
        self._replace = self.replacements.set
        self.checks: dict[tuple[str, str], Any] = {}
        self._parts: list[Any] = []
        self._attached: list[Any] = []

    @left_on_error
    def __enter__(self) -> DistributedModel:
        if self._parts:
            self.replacements.resume()
        else:
            self._replace_methods()
        for optimizer in self._attached:
            attach_average(optimizer, self.average, waits=self._waits and optimizer is self.model.optimizer)
        return self

    def _replace_methods(self) -> None:
        self._replace(self.model, CONTEXT, self)
        self._replace(self.model, "train_step", self.step)
        self._replace(self.model, "train_function", None)
        self.test = DistributedTestStep(self.model, self._reducer, self.prepare_test)
        if self.channel.size > 1:
            self._replace(self.model, "test_step", self.test)
            self._replace(self.model, "test_function", None)
            self._replace(self.model, "test_on_batch", self.test.on_batch)
        self._replace(self.model, "_get_metrics_result_or_logs", self._epoch_logs)
        self._replace(self.model, "reset_metrics", self._reset_metrics)
        found = optimizers(self.model) if self.channel.size > 1 else []
        self._attached = [optimizer for optimizer in found if not is_distributed(optimizer)]
        whole = not self._own_step and self.world is self.channel and self.model.optimizer in self._attached
        self._waits = whole and accumulates(self.model.optimizer)
        if self._waits:
            self._replace(self.model, ACCUMULATED, self._accumulated)
        if self.channel.size > 1:
            disable_xla(self.model, self.channel.rank, self.replacements)

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        try:
            if self._has_unmerged():
                object.__setattr__(self.model, UNMERGED, True)
            self.replacements.suspend()
            for optimizer in self._attached:
                detach_average(optimizer)
        except KeyboardInterrupt:  # it may come again and again
            self.__exit__(KeyboardInterrupt)
            raise
        self._parts = _parts_of(self.model) if kind is None else []  # after an error, steps are traced anew

    def is_unchanged(self) -> bool:
        """Return whether the model is as it was when the context was left: its steps need not be traced again."""
        parts = _parts_of(self.model)
        same = len(parts) == len(self._parts) and all(a is b for a, b in zip(parts, self._parts, strict=True))
        return self.is_current() and same

    @contextlib.contextmanager
    def owned_optimizer(self, totals: Totals = ()) -> Iterator[None]:
        """Context manager: the state of the optimizer is cut over the ranks; the model has variables. *Collective*."""
        if self.channel.size == 1:
            yield
            return
        owned = OwnedOptimizer(self.model.optimizer, self.model.trainable_variables, self.average, totals)
        with owned, replaced(self, _owns=True):
            object.__setattr__(self.model, "train_function", None)
            try:
                yield
            finally:
                object.__setattr__(self.model, "train_function", None)

    def _averages_early(self) -> bool:
        """Return whether tapes return averages: a step of the user's own may compute with them, and not with sums."""
        return self._own_step or not (self._owns or self._waits)

    def _accumulated(self) -> list[Any]:
        """Return what each rank has added up of its own gradients, whose mean is that of all ranks."""
        optimizer = inner_optimizer(self.model.optimizer)
        return list(optimizer._accumulated_gradients) if optimizer.built and not self._owns else []

    def is_current(self) -> bool:
        """Return whether the model has not been compiled again since the context was entered."""
        return self._compiled is self.model._loss_tracker

    @property
    def samples_seen(self) -> Any:
        """Return the variable with the number of samples of all ranks so far."""
        return self.step.samples_seen

    def broadcast(self) -> None:
        """Broadcast the variables of rank 0 that are equal on all ranks. *Collective*."""
        broadcast_in(self.channel, [*replicated_variables(self.model), *seeds(self.model)])

    def prepare(self, element_spec: Any, whole_batches: bool = False) -> None:
        """Create the variables of the model and broadcast them from rank 0. *Collective*.

        Parameters
        ----------
        whole_batches : every rank gets whole batches, of which its steps select its rows.
        """
        if self.channel.size == 1:
            build(self.model, element_spec)
            return
        check_preprocessing(self.model, self.channel)
        if self.channel.communicator.maximum(self._has_unmerged())[0]:  # one rank may have been ahead by a step
            self._merge()
        equal = self._equal_weights(element_spec)
        with assignments_of_build(self.model.optimizer) as assigned:
            build(self.model, element_spec)
        if assigned and not self.model.run_eagerly and self.channel.rank == 0:
            log.warning(
                "build() of %s assigns to %s before the first step; one process traces build() with the first step, "
                "and the variable keeps its initial value, mostly zeros\n"
                "  remedy: give variables their values by add_variable(initializer=...), or call "
                "optimizer.build(model.trainable_variables) before fit",
                type(self.model.optimizer).__name__,
                assigned[0],
            )
        variables = [*replicated_variables(self.model), *seeds(self.model)]
        broadcast_in(self.channel, [v for v in variables if id(v) not in equal])
        per_sample = leaves_per_sample(element_spec) if whole_batches else None
        reducer = None if _equal_batches(self.channel, element_spec, per_sample) else self._reducer
        if self.prepared and (reducer, per_sample) != (self.step.reducer, self.step.per_sample):
            self.model.make_train_function(force=True)  # the existing graph weighs batches differently
        self.step.reducer, self.step.per_sample = reducer, per_sample
        if not self.prepared:
            self.prepared = True
            self._replace_losses()
            self._take_global_moments(self.replacements, synchronized=True)

    def _equal_weights(self, element_spec: Any) -> set[int]:
        """Create and broadcast the weights, which an optimizer may copy when it is built; return their identities.

        None of them on any rank where the model cannot be built so: it may work in its own ``train_step`` alone, which
        ``build`` traces, and which raises what is wrong with it. *Collective*.
        """
        failed = False
        try:
            build_without_optimizer(self.model, element_spec)
        except Exception:  # of any kind: the other ranks wait
            failed = True
        weights = [] if self.channel.communicator.maximum(failed)[0] else replicated_weights(self.model)
        broadcast_in(self.channel, weights)
        return {id(weight) for weight in weights}

    def _has_unmerged(self) -> bool:
        """Return whether each rank has its own state of steps: an error has ended their epoch, or they had none."""
        return UNMERGED in vars(self.model) or int(self.samples_seen.numpy()) != self._merged

    def merge_accumulated(self) -> None:
        """Give all ranks what they add up by themselves before the script may save it. *Collective*."""
        if self._waits:
            self._merge()

    def _merge(self) -> None:
        """Give all ranks the average of what each has of its own rows. *Collective*."""
        average_moving_statistics(self.model, self.channel)
        self._merged = int(self.samples_seen.numpy())
        vars(self.model).pop(UNMERGED, None)

    def unrounded_gradients(self) -> Replacements:
        """Return a context manager: gradients are sent as they are, whatever the wire dtype."""
        return replaced(self._reducer, wire_dtype=None)

    def train_on_whole(self, merge: bool = False) -> None:
        """Train on whole batches from now on, as one process does. *Collective*.

        Parameters
        ----------
        merge : steps on shards came before: the ranks get one state, that of rank 0.
        """
        if merge:
            self._merge()
            broadcast_in(self.channel, replicated_variables(self.model))
            combine_metrics(self.channel, self.model)
        self.step.whole = self.test.whole = True
        self.test.gathers &= self.step.per_sample is None
        self.model.make_train_function(force=True)
        object.__setattr__(self.model, "test_function", None)
        if getattr(self.model, "_eval_epoch_iterator", None) is not None:
            self.model._eval_epoch_iterator = None  # its batches are sharded

    def own_variables(self) -> list[Any]:
        """Return the variables of TensorFlow that this package adds to the steps of the model."""
        rows = vars(self.model).get("_matex_rows")
        return [self.step.samples_seen, *([] if rows is None else [rows]), *gathering_flags(self.model)]

    def weighed(self, always: bool) -> Replacements:
        """Return a context manager: traced steps weigh each rank by its rows, also if all batches split evenly."""
        return replaced(self.step, reducer=self._reducer if always else self.step.reducer)

    def evaluate_whole(self) -> None:
        """Evaluate whole batches from now on, which the ranks gather. *Collective*."""
        self.test.whole = self.test.gathers = True
        self.model.make_test_function(force=True)

    def has_scalar_losses(self) -> bool:
        """Return whether a loss of the latest step was one number for a batch, whose divisor is not known."""
        return any(loss.scalar for loss in self._losses or ())

    def set_sum_losses(self, sums: bool) -> None:
        """Take losses that are one number for a batch as sums, or as means."""
        for loss in self._losses or ():
            loss.sums = sums

    def normalizes_locally(self) -> bool:
        """Return whether a trainable ``BatchNormalization`` uses the statistics of this rank's rows alone."""
        return not self._sync_batch_norm and bool(local_normalizations(self.model))

    def global_normalization(self) -> Replacements:
        """Return a context manager: all ``BatchNormalization`` layers use the statistics of the global batch."""
        replacements = Replacements()
        self._take_global_moments(replacements, synchronized=False)
        return replacements

    def prepare_test(self, data: Any) -> None:
        """Replace the losses and metrics of a model that is evaluated before it is trained."""
        if self._losses is None:
            build_losses(self.model, data)
            self._replace_losses()

    def _replace_losses(self) -> None:
        if self._losses is not None:
            return
        replace_custom_metrics(self.model, self.channel, self._replace)
        losses = distributed_losses(self.model, self._reducer)
        self._losses = [entry.loss for entry in losses]
        if losses:
            self._replace(self.model._compile_loss, "_flat_losses", losses)
            if any(is_unreduced(loss.loss) for loss in self._losses):
                self._replace(self.model, "compute_loss", SummedLoss(self.model.compute_loss, self.channel))

    def _take_global_moments(self, replacements: Replacements, synchronized: bool) -> None:
        for layer in batch_normalizations(self.model):
            if (self._sync_batch_norm or layer.synchronized) == synchronized:
                replacements.set(layer, "_moments", GlobalMoments(layer, self._reducer))

    def _reset_metrics(self) -> None:
        type(self.model).reset_metrics(self.model)
        note_reset(self.model)
        self.test.begins = True

    def _epoch_logs(self, logs: Any) -> Any:
        """Return the logs of an epoch or of an evaluation over all ranks. *Collective*."""
        evaluated, self.test.running = self.test.running, False
        if self.channel.size == 1 or self.step.whole or (evaluated and self.test.whole):
            return type(self.model)._get_metrics_result_or_logs(self.model, logs)
        average_moving_statistics(self.model, self.channel)
        if not evaluated:
            self._merged = int(self.samples_seen.numpy())
        return self.combined(logs, evaluated=evaluated)

    def batch_logs(self, logs: dict[str, Any], evaluated: bool = False) -> dict[str, Any]:
        """Return the logs of a batch of ``fit`` or of an evaluation over all ranks; the epoch goes on. *Collective*."""
        if self.channel.size == 1 or self.step.whole or (evaluated and self.test.whole):
            return logs
        if all(own_method(self.model, name) is None for name in ("test_step" if evaluated else "train_step", *LOGS)):
            return results_of_all(self.channel, self.model)
        with self.within_epoch():
            return self.combined(logs, of_batch=True, evaluated=evaluated)  # type: ignore[no-any-return]

    def combined(self, logs: Any, of_batch: bool = False, evaluated: bool = False) -> Any:
        """Return the logs of an epoch, an evaluation or a batch over all ranks. *Collective*."""
        step = self.test if evaluated or not (self.step.reductions or self.step.possible) else self.step
        return combined_logs(self.model, self.channel, logs, step.kinds(), of_batch, self._warn_of_own)

    def _warn_of_own(self, keys: list[str]) -> None:
        """Warn once of numbers that a step returns and that do not combine over the ranks."""
        new = [key for key in keys if key not in self._warned]
        self._warned.update(new)
        if self.channel.rank == 0 and new:
            log.warning(
                "a step of %s returns %s: not known as a mean, sum, maximum or minimum over the samples, so the value "
                "is that of the rows of rank 0 alone\n"
                "  remedy: return the result of a metric, which is that of all ranks",
                *(self.model.name, ", ".join(new)),
            )

    @contextlib.contextmanager
    def within_epoch(self) -> Iterator[None]:
        """Context manager: evaluate or combine logs in a callback of ``fit``; epoch and validation then go on."""
        rows = vars(self.model).get("_matex_rows")
        before = None if rows is None else rows.numpy()
        try:
            with replaced(self.test, agrees=self.test.agrees):
                yield
        finally:
            if rows is not None:
                rows.assign(before)


def distributed_model(
    model: Any,
    channel: Channel,
    sync_batch_norm: bool = False,
    wire_dtype: WireDtype | None = None,
    collectives: Choice = "auto",
    verify: str = "proven",
) -> DistributedModel:
    """Return the context of a model: that of the latest call with these arguments if it is unchanged. *Collective*."""
    arguments = (channel, sync_batch_norm, wire_dtype, collectives, verify)
    before, found = vars(model).get(LATEST, ((), None))
    if channel.communicator.maximum(before != arguments or not found.is_unchanged())[0]:
        reducer = Reducer(channel, wire_dtype=wire_dtype, collectives=collectives)
        found = DistributedModel(model, channel, sync_batch_norm, reducer)
    object.__setattr__(model, LATEST, (arguments, found))
    return found  # type: ignore[no-any-return]


def leave_launcher(model: Any) -> None:
    """Leave the context in which ``matex run`` trains or evaluates a model, which is about to be in another one."""
    found = vars(model).get(BY_LAUNCHER)
    if found is not None:
        found.__exit__()
        object.__delattr__(model, BY_LAUNCHER)


def evaluated_model(model: Any, channel: Channel, verify: str) -> DistributedModel:
    """Return the context in which a model is evaluated: that of its latest training if unchanged. *Collective*."""
    default: tuple[Any, ...] = (channel, False, None, "auto", verify)
    latest, _ = vars(model).get(LATEST, (default, None))
    _, sync_batch_norm, wire_dtype, collectives, _ = latest if latest[0] is channel else default
    return distributed_model(model, channel, sync_batch_norm, wire_dtype, collectives, verify)


def _parts_of(model: Any) -> list[Any]:
    """Return the objects to which the traced steps of a model refer; scripts may replace them."""
    steps = [vars(model).get(name) for name in ("train_function", "train_step", "test_step")]
    variables = [v.value for v in (*model.variables, *optimizer_variables(model))]
    return [*steps, model.optimizer, *model._flatten_layers(), *variables]


def replace_function(
    replacements: Replacements, model: Any, kind: str, call: Callable[[Callable[..., Any], Any], Any]
) -> None:
    """Run the steps of a model by a function of its train, test or predict function, as it then is, and the data.

    Parameters
    ----------
    kind : "train", "test" or "predict".
    call : gets the function, which with ``single=True`` runs one step of an execution, and the data.
    """
    replacements.set(model, f"{kind}_function", getattr(model, f"{kind}_function"))
    replacements.set(model, f"make_{kind}_function", FunctionMaker(model, kind, call))
    getattr(model, f"make_{kind}_function")()


class FunctionMaker:
    """``make_train_function`` of a model whose train function is called by another function; or of test and predict."""

    def __init__(self, model: Any, kind: str, call: Callable[[Callable[..., Any], Any], Any]) -> None:
        self._name = f"{kind}_function"
        self.wrapped = getattr(model, f"make_{self._name}")
        self._model, self._call, self._function = model, call, getattr(model, self._name)
        self._single: Any = None

    def __call__(self, force: bool = False) -> Any:
        anew = force or getattr(self._model, self._name) is None
        self._single = None if anew else self._single
        self._function = self._made(None if anew else self._function, force)
        object.__setattr__(self._model, self._name, self._run)
        return self._run

    def _made(self, before: Any, force: bool) -> Any:
        object.__setattr__(self._model, self._name, before)
        self.wrapped(force)
        return getattr(self._model, self._name)

    def _run(self, data: Any) -> Any:
        return self._call(self._of_model, data)

    def _of_model(self, data: Any, single: bool = False) -> Any:
        if not single:
            return self._function(data)
        with replaced(self._model, steps_per_execution=1):
            if self._single is None:
                self._single = self._made(None, True)
                object.__setattr__(self._model, self._name, self._run)
            return self._single(data)


def open_context(model: Any) -> DistributedModel | None:
    """Return the context in which ``fit`` trains a model at present, or which ``matex run`` has opened."""
    found = vars(model).get(CONTEXT)
    return found if isinstance(found, DistributedModel) else None


def _equal_batches(channel: Channel, element_spec: Any, per_sample: list[bool | None] | None) -> bool:
    """Return whether all ranks have equal numbers of rows in every batch, by their element specs. *Collective*."""
    rows = static_rows(element_spec, per_sample)
    by_rank = channel.host.allgather_object(rows)
    if per_sample is not None:
        return rows is not None and rows % channel.size == 0
    return by_rank[0] is not None and len(set(by_rank)) == 1
