"""Comparison of a step on shards of a batch with the same step on their union, by pairs of ranks."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from matex_data.machine import memory_shortage
from matex_data.training.checking.batches import union_spec
from matex_data.training.checking.comparison import (
    REPETITIONS,
    Rounding,
    Verdict,
    distances,
    epsilon,
    finite,
    judge,
    other_last_bits,
)
from matex_data.training.checking.probe import METRICS, Effects, NotCheckable, Probe, refuse_eager
from matex_data.training.checking.report import RAISES
from matex_data.training.comm.channel import Channel
from matex_data.training.exact.attributes import Attributes
from matex_data.training.exact.logs import possible_reductions
from matex_data.training.exact.metrics import change_rules, gather_functions
from matex_data.training.exact.rows import batch_size, leaves_per_sample, rank_bounds, rows_between, static_rows
from matex_data.training.exact.step import RankStep, whole_batch
from matex_data.training.replacements import replaced

if TYPE_CHECKING:
    from matex_data.training.distributed_model import DistributedModel


class RankPair:
    """This rank and its neighbour in a round of a check, connected.

    They are ranks 0 and 1, 2 and 3, ... in the first round, 1 and 2, 3 and 4, ... in the next. A step that treats the
    shards of all neighbours as their union treats all shards so. *Collective* among the two: each rank makes its pair
    at the begin of a round, since the other one may have nothing left to trace in a later round.

    Parameters
    ----------
    number : number of the round, from 0.

    Attributes
    ----------
    ranks : both, in ascending order; none where this rank has no neighbour in the round.
    """

    def __init__(self, channel: Channel, number: int) -> None:
        self._channel = channel
        rank, size = channel.rank, channel.size
        lower = (rank + number) % 2 == 0
        other = 1 - rank if size == 2 else rank + 1 if lower else rank - 1
        self.ranks = sorted((rank, other)) if 0 <= other < size else []
        # Even ranks are the first in all pairs, so that one traced step serves all.
        among = sorted(self.ranks, key=lambda rank: rank % 2)
        self._subset = channel.subset(among) if among and size > 2 else None

    def rows(self, total: int) -> tuple[int, int]:
        """Return the first row of the pair in a batch of ``total`` rows, and the one after its last."""
        (start, _), (_, stop) = (rank_bounds(total, rank, self._channel.size) for rank in self.ranks)
        return start, stop

    def joined(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager: the channel consists of the pair."""
        return contextlib.nullcontext() if self._subset is None else self._channel.among(self._subset)


COPIES = 3
"""Memory of a step in multiples of its activations: values, gradients, and one temporary."""
WHERE = ("Exception encountered when calling", "Graph execution error", "Detected at node", "File ")
"""Beginnings of lines with which Keras and TensorFlow say where an error was raised."""
LEAST_ROWS = 2
"""Rows of a pair of ranks, at least, to check a step with."""


class ShardComparison:
    """Comparison of one step of a model on shards with the step on their union. Its methods are *collective*.

    Attributes
    ----------
    sums : losses that are one number for a batch had to be taken as sums.
    gathered : names of the metrics whose functions now get the rows of all ranks, since metrics alone differed.
    probe : the step on whole batches; None before it was traced.
    """

    def __init__(self, distributed: DistributedModel, step: RankStep) -> None:
        self._distributed, self._step = distributed, step
        self._trains = step is distributed.step
        self._channel = distributed.channel
        self._pair: RankPair  # of the present round
        self._probes: tuple[Probe, Probe] | None = None
        self._first, self._limited = True, False
        self._spec: Any = None
        self._gathers = False
        self._rules: list[str] = []
        self.sums = False
        self.gathered: list[str] = []

    @property
    def probe(self) -> Probe | None:
        """Return the step on whole batches, once it is traced."""
        return self._probes[0] if self._probes is not None and self._probes[0].traced else None

    def begin_anew(self) -> None:
        """Trace the step again before the next comparison."""
        self._probes = None

    def flags(self, spec: Any) -> list[bool | None]:
        """Return for each leaf of the batches whether it has one row per sample; see ``leaves_per_sample``."""
        known = self._step.per_sample or []
        return known if len(known) == len(tf.nest.flatten(spec)) else leaves_per_sample(spec)

    def compare(self, batch: Any, spec: Any, first: bool, gathers: bool = False) -> tuple[str | None, Verdict]:
        """Return why the step cannot be compared, as a clause, or None; and the verdict.

        Parameters
        ----------
        batch : of all ranks.
        spec : element spec of such batches.
        first : it was not compared before.
        gathers : ``batch`` has this rank's rows alone; pairs of ranks exchange theirs.
        """
        self._spec, self._first, self.sums, self._gathers = spec, first, False, gathers
        cause = self._agreed(self._hindrance(batch))
        verdict = Verdict()
        # All neighbours are compared, since a batch may differ in the rows of some ranks alone.
        for number in range(1 if self._channel.size == 2 else 2):
            if cause is None and verdict.agree:
                result = self._compare(batch, number)
                cause = result if isinstance(result, str) else None
                verdict = verdict if isinstance(result, str) else result
        return cause, verdict

    def _hindrance(self, batch: Any) -> str | None:
        """Return why the model cannot be checked at all, as a clause; None if it can. *Collective*."""
        model = self._distributed.model
        rows = int(batch_size(batch))
        total = np.array([rows], np.int64)
        if self._gathers:
            self._channel.host.reduce(total)
        try:
            refuse_eager(model)
        except NotCheckable as reason:
            return str(reason)
        lengths = {
            int(tf.shape(leaf)[0])
            for leaf, known in zip(tf.nest.flatten(batch), self.flags(self._spec), strict=True)
            if known is None and tf.is_tensor(leaf) and leaf.shape.rank
        }
        if lengths - {rows}:
            return f"its inputs have {sorted(lengths | {rows})} rows, so that those of a sample are not known"
        if total[0] < self._channel.size and self._first:
            return f"its batches have fewer rows ({total[0]}) than there are ranks ({self._channel.size})"
        return None

    def _compare(self, batch: Any, number: int) -> Verdict | str:
        """Compare shards with their union; return the verdict, or why it is not known. *Collective*."""
        self._pair = RankPair(self._channel, number)
        union = self._union(batch) if self._pair.ranks else None
        if union is not None and not int(batch_size(union)):  # there is nothing to compare
            union = None
        whole: list[Effects] = []

        def run_whole() -> None:
            probe, _ = self._traced_probes()  # on all ranks: the first call of a layer may create variables
            if union is not None:
                whole.append(probe.run(union))
                if not finite(whole[0]):
                    raise NotCheckable("no gradient is finite")

        def trace_shards() -> None:
            if union is not None:
                self._trace_shards()

        for action in (run_whole, trace_shards):
            cause = self._agreed(self._failure(action))
            if cause is not None:
                return f"{cause}"
        verdict = self._verdict(union, whole)
        if not self._agreeing(verdict):
            verdict = self._verdict(union, whole, REPETITIONS)
        if not self._agreeing(verdict) and self._first:
            second = self._verdict_for_sums(union, whole)
            self.sums = self._agreeing(second)
            self._distributed.set_sum_losses(self.sums)
            verdict = second if self.sums else verdict
        if not self._agreeing(verdict) and self._first:
            verdict = self._verdict_for_metrics(union, whole, verdict)
        return self._worst(verdict)

    def _verdict_for_metrics(self, union: Any, whole: list[Effects], verdict: Verdict) -> Verdict:
        """Compare again with metric functions of the rows of all ranks, if metrics alone differ. *Collective*."""
        others = not (verdict.agree or verdict.name.startswith(METRICS))
        if self._channel.communicator.maximum(others)[0]:
            return verdict
        found = gather_functions(self._distributed.model)
        self.gathered += found
        failed = self._agreed(None if union is None or not found else self._failure(self._trace_again))
        return verdict if failed or not found else self._verdict(union, whole, REPETITIONS)

    def _verdict_for_sums(self, union: Any, whole: list[Effects]) -> Verdict:
        """Compare again with losses of one number for a batch as sums. *Collective*."""
        scalar = self._agreed(True if self._distributed.has_scalar_losses() else None)
        self._distributed.set_sum_losses(True)
        if scalar is None or self._agreed(None if union is None else self._failure(self._trace_again)):
            return Verdict(np.inf)
        return self._verdict(union, whole, REPETITIONS)

    def _union(self, batch: Any) -> Any:
        """Return the rows of this rank and its partner, as many as the memory holds. *Collective* among them."""
        if self._gathers:
            with self._pair.joined():
                batch = whole_batch(self._channel, batch)
        total = int(batch_size(batch))
        start, stop = (0, total) if self._gathers else self._pair.rows(total)
        per_sample = self.flags(self._spec)
        bytes_per_row = max(1, _bytes(self._distributed.model, batch, total) // max(total, 1))
        rows = stop - start
        while rows > LEAST_ROWS and memory_shortage(rows * bytes_per_row, "a batch", remedy="") is not None:
            rows //= 2
        if self._limited != (rows < stop - start):
            self._limited = not self._limited
            self.begin_anew()
        return batch if rows == total else rows_between(batch, start, start + rows, per_sample)

    def _traced_probes(self) -> tuple[Probe, Probe]:
        if self._probes is None:
            spec = self._relaxed(self._spec)
            whole, sharded = (Probe(self._distributed, self._step, spec, on_whole) for on_whole in (True, False))
            self._probes = whole, sharded
            self._trace_probe(0)
        return self._probes

    def _relaxed(self, spec: Any) -> Any:
        """Return the spec for a pair of ranks, whose batches have fewer rows than those of all."""
        if self._channel.size == 2:
            return spec
        flags = self.flags(spec)
        known = static_rows(spec, flags)
        even = known is not None and known % self._channel.size == 0 and not self._limited
        rows = 2 * known // self._channel.size if known is not None and even else None
        return union_spec(spec, rows, flags)

    def _trace_probe(self, which: int) -> None:
        """Trace a probe once; raise ``NotCheckable`` as it does, and if Python code changes the model."""
        assert self._probes is not None
        if self._probes[which].traced:
            return
        attributes = Attributes(self._distributed.model)
        state, among_all = random.getstate(), self._channel.size == 2
        try:
            joined = self._pair.joined() if which else contextlib.nullcontext()
            weighed = self._trains and not among_all
            with joined, self._distributed.weighed(weighed), replaced(self._step, per_sample=self.flags(self._spec)):
                self._probes[which].trace()
        finally:
            changed = attributes.changed()
            drew = random.getstate() != state
            attributes.restore()
        if changed:
            raise NotCheckable(f"its Python code changes {changed[0]} when it is called")
        if drew:
            raise NotCheckable("its Python code draws random numbers when it is called")
        if which:
            self._rules = change_rules(self._distributed.model)

    def _trace_again(self) -> None:
        """Trace the probe of shards once more, since its losses now count as sums."""
        assert self._probes is not None
        self._probes[1].traced = False
        self._trace_shards()

    def _trace_shards(self) -> None:
        """Trace the step on shards; batch normalization in training is compared with that of the whole batch."""
        normalization = self._distributed.global_normalization() if self._trains else contextlib.nullcontext()
        with normalization, self._distributed.unrounded_gradients():
            self._trace_probe(1)

    def _verdict(self, union: Any, whole: list[Effects], repetitions: int = 0) -> Verdict:
        """Compare the shards of this rank's pair with their union. *Collective* within the pair.

        Parameters
        ----------
        repetitions : with so many other last bits of the weights, too, which measures rounding.
        """
        if union is None:
            return Verdict()
        rounding = Rounding(epsilon(self._distributed.model))
        try:
            expected, sharded = self._run_shards(union, whole[0], with_logs=True)
            differences = distances(expected, sharded)
            for number in range(1, repetitions + 1):
                with other_last_bits(self._distributed.model, number):
                    other = self._traced_probes()[0].run(union)
                    rounding.measure(whole[0], other)
                    found = distances(*self._run_shards(union, other))
                differences = {name: min(d, found.get(name, d)) for name, d in differences.items()}
        except tf.errors.OpError as error:
            return Verdict(np.inf, np.inf, f"step ({type(error).__name__}: {error.message.splitlines()[0]})")
        return judge(expected, sharded, differences, rounding)

    def _run_shards(self, union: Any, whole: Effects, with_logs: bool = False) -> tuple[Effects, Effects]:
        """Run the step on shards; return the effects for the union that can be compared, and those of the shards.

        *Collective* within the pair.

        Parameters
        ----------
        with_logs : note how the numbers that shards return make up that of the union.
        """
        assert self._probes is not None
        with self._pair.joined():
            sharded = self._probes[1].run(union)
            combined = self._combined(sharded.metrics)
            logs = self._channel.host.allgather_object((sharded.logs, sharded.rows)) if with_logs else []
        for key, value in whole.logs.items() if with_logs else ():
            shards = [(numbers[key], rows) for numbers, rows in logs if key in numbers]
            if len(shards) == len(logs):
                possible = possible_reductions(shards, value)
                self._step.possible.setdefault(key, possible).intersection_update(possible)
        known = {i: change for i, change in whole.metrics.items() if i in combined}
        expected = Effects(whole.named(known), resolutions=whole.resolutions)
        return expected, Effects(sharded.named({i: combined[i] for i in known}))

    def _combined(self, changes: dict[int, Any]) -> dict[int, Any]:
        """Return the changes of metrics, combined over the ranks of the pair. *Collective* among them."""
        out: dict[int, Any] = {}
        for i, change in changes.items():
            value = np.array(change, np.float64, order="C")
            if self._rules[i] == "sum":
                self._channel.host.reduce(value.reshape(-1))
            if self._rules[i] in ("sum", "equal"):
                out[i] = value
        return out

    def _agreeing(self, verdict: Verdict) -> bool:
        """Return whether all ranks find that shards and their union agree. *Collective*."""
        return not self._channel.communicator.maximum(not verdict.agree)[0]

    def _worst(self, verdict: Verdict) -> Verdict:
        """Return the verdict of the rank that differs most. *Collective* if one does."""
        if self._agreeing(verdict):
            return verdict
        by_rank: list[Verdict] = self._channel.host.allgather_object(verdict)
        return max(by_rank, key=lambda verdict: (not verdict.agree, verdict.excess))

    def _failure(self, action: Callable[[], Any]) -> str | None:
        """Run an action; return why it failed, as a clause."""
        try:
            action()
        except NotCheckable as reason:
            return str(reason)
        except Exception as error:  # the code of the script may raise anything
            return f"{RAISES} {type(error).__name__}: {first_reason(str(error))}"
        return None

    def _agreed(self, reason: Any) -> Any:
        """Return the reason of the first rank that has one; None if none has. *Collective*."""
        if not self._channel.communicator.maximum(reason is not None)[0]:
            return None
        return next(r for r in self._channel.host.allgather_object(reason) if r is not None)


def first_reason(text: str) -> str:
    """Return the first line of the text of an error that says more than where it was raised."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in text.splitlines()]
    return next((line for line in lines if line and not line.startswith(WHERE)), "")


def _bytes(model: Any, batch: Any, total: int) -> int:
    """Return the approximate memory of a step on the whole batch, in bytes: data, activations and gradients."""
    data = sum(leaf.dtype.size * int(tf.size(leaf)) for leaf in tf.nest.flatten(batch) if isinstance(leaf, tf.Tensor))
    activations = 0
    for layer in model._flatten_layers():
        try:
            outputs = keras.tree.flatten(layer.output)
        except (AttributeError, ValueError):  # layers outside of functional models have no output yet
            continue
        activations += 4 * sum(int(np.prod([size or 1 for size in x.shape[1:]])) for x in outputs)
    weights = sum(int(np.prod(v.shape)) * 4 for v in model.trainable_variables)
    return int(data + COPIES * activations * total + 4 * weights)
