"""Models that predict without having been trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf

from matex_data.training.checking.report import CheckReport
from matex_data.training.comm.channel import Channel
from matex_data.training.exact.listed import Proof, own_method, prove


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


class ForwardProofs:
    """Models that are known to compute each row of their data by itself, each looked at once.

    Parameters
    ----------
    channel : ranks that share the rows.
    report : messages about models that are not known.
    """

    def __init__(self, channel: Channel, report: CheckReport) -> None:
        self._channel, self._report = channel, report
        self._known: WeakKeyDictionary[Any, dict[str, bool]] = WeakKeyDictionary()

    def proven(self, model: Any, x: Any) -> bool:
        """Return whether a model predicts each row of such data by itself, the same on all ranks. *Collective*.

        Parameters
        ----------
        x : as for ``predict``.
        """
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
