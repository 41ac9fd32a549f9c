"""Check of predictions: whether a model computes each row of a batch by itself."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np
import tensorflow as tf

from matex_data._types import Array
from matex_data.mpi.activity import busy
from matex_data.training.checking.comparison import Rounding, distances, epsilon, judge
from matex_data.training.checking.draws import draws_for_rows
from matex_data.training.checking.probe import Effects, NotCheckable, refuse_eager, refuse_hidden_state, resources
from matex_data.training.checking.report import CheckReport
from matex_data.training.comm.channel import Channel
from matex_data.training.distributed_model import replace_function
from matex_data.training.exact.attributes import Attributes, kept_random_state, kept_variables
from matex_data.training.exact.listed import agreed_proof, specs_of
from matex_data.training.exact.rows import batch_size, leaves_per_sample, rows_between
from matex_data.training.replacements import Replacements

log = logging.getLogger("matex_data.training")

UNITS = 16
"""Rounding of predictions, in multiples of that of a step: rows may be computed in other groups."""


class RowCheck:
    """Check of the first batch of this rank that a model predicts.

    Parameters
    ----------
    known : it is known to compute each row by itself: nothing is checked.
    spec : returns the element spec of the batches, which tells leaves that have no row for each sample even where a
        batch has as many rows; None: the batch itself tells them.
    stops : end the prediction if the model cannot be checked, which is then a cause; otherwise rank 0 warns.
    """

    def __init__(self, channel: Channel, model: Any, known: bool, spec: Callable[[], Any], stops: bool = False) -> None:
        self._channel, self._model, self._spec, self._stops = channel, model, spec, stops
        self._hindrance: str | None = None
        self._known = known or channel.size == 1
        self._done = self._known
        self._own: str | None = None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Context manager in which ``model.predict`` is checked once; it catches the end of a prediction."""
        with Replacements() as replacements, contextlib.suppress(NotCheckable):
            if not self._done:
                replace_function(replacements, self._model, "predict", self._checked)
            yield

    def cause(self) -> str | None:
        """Return how predictions of rows depend on other rows on a rank, as a clause; None if not. *Collective*."""
        if self._known:
            return None
        by_rank = self._channel.host.allgather_object((self._done, self._own, self._hindrance))
        hindrance = next((reason for *_, reason in by_rank if reason is not None), None)
        cause = next((cause for _, cause, _ in by_rank if cause is not None), hindrance if self._stops else None)
        if self._channel.rank == 0 and cause is None:
            if hindrance is not None:
                log.warning("the predictions of %s are not checked: %s", self._model.name, hindrance)
            elif not any(done for done, *_ in by_rank):
                log.warning(
                    "the predictions of %s are not checked, since no rank has more than one row of a batch\n"
                    "  remedy: a larger batch_size",
                    self._model.name,
                )
        return cause

    def _checked(self, run: Callable[[Any], Any], data: Any) -> Any:
        batch = data[0] if isinstance(data, list) else data
        rows = batch_size(batch)
        if not self._done and rows is not None and int(rows) > 1:
            self._done = True
            kept = kept_variables(resources(self._model.non_trainable_variables))
            attributes = Attributes(self._model)
            try:
                refuse_eager(self._model)
                with busy("its self-check"), kept_random_state(), kept:
                    spec = self._spec()
                    flags = leaves_per_sample(batch if spec is None else spec)
                    self._own = _difference(self._model, batch, int(rows), flags)
            except NotCheckable as reason:
                self._hindrance = str(reason)
                if self._stops:
                    raise
            finally:
                attributes.restore()
        return run(data)


class ForwardProofs:
    """Models that are known to compute each row of their data by itself, each looked at once."""

    def __init__(self, channel: Channel, report: CheckReport) -> None:
        self._channel, self._report = channel, report
        self._known: WeakKeyDictionary[Any, dict[str, bool]] = WeakKeyDictionary()

    def proven(self, model: Any, x: Any) -> bool:
        """Return whether a model predicts each row of such data by itself, the same on all ranks. *Collective*."""
        if not model.built:  # its first call builds it, and creates what it needs
            return False
        specs = _specs(x)
        known = self._known.setdefault(model, {})
        key = f"{specs} {model.trainable}"
        if key not in known:
            proof = agreed_proof(self._channel, model, specs, losses=False, step="predict_step")
            known[key] = proof.proven
            if not proof.proven:
                self._report.predicts_all(model, proof)
        return known[key]


def _specs(x: Any) -> list[Any] | None:
    """Return the specs of the data; None if they are not known."""
    if isinstance(x, tf.data.Dataset):
        return specs_of(x.element_spec)
    leaves = [leaf for leaf in tf.nest.flatten(x) if leaf is not None]
    if all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves):
        return [tf.TensorSpec([None, *leaf.shape[1:]] if len(leaf.shape) else [], leaf.dtype) for leaf in leaves]
    return None


def _difference(model: Any, batch: Any, rows: int, per_sample: Sequence[bool | None]) -> str | None:
    """Return how rows depend on other rows, as a clause; None if not.

    Raises
    ------
    NotCheckable : the step keeps state that cannot be put back.
    """
    parts = [(0, rows), (0, rows // 2), (rows // 2, rows)]

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def predict(start: Any, stop: Any, batch: Any) -> Any:
        with draws_for_rows((start, stop), tf.constant(rows)):
            return model.predict_step(rows_between(batch, start, stop, per_sample))

    try:
        refuse_hidden_state(predict.get_concrete_function(tf.constant(0), tf.constant(rows), batch).graph)
        whole, *halves = (_arrays(predict(tf.constant(start), tf.constant(stop), batch)) for start, stop in parts)
    except NotCheckable:
        raise
    except Exception as error:  # the code of the script may raise anything
        return f"its predict_step raises {type(error).__name__} for a part of a batch"
    expected = Effects({**whole})
    joined = Effects({name: np.concatenate([half[name] for half in halves]) for name in whole})
    verdict = judge(expected, joined, distances(expected, joined), Rounding(UNITS * epsilon(model)))
    return None if verdict.agree else f"{verdict.name} of rows differ by {verdict.difference:.2g} with other rows"


def _arrays(outputs: Any) -> dict[str, Array]:
    """Return outputs by name, as numbers."""
    leaves = [leaf for leaf in keras.tree.flatten(outputs) if isinstance(leaf, tf.Tensor) and leaf.shape.rank]
    return {f"predictions {i + 1}": np.asarray(leaf) for i, leaf in enumerate(leaves) if leaf.dtype != tf.string}
