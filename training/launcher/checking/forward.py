"""Proof of models that predict or evaluate without having been trained."""

from __future__ import annotations

import contextlib
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np
import tensorflow as tf

from matex_data.training.comm.channel import Channel
from matex_data.training.launcher.checking.report import Report
from matex_data.training.proof.axes import Reason
from matex_data.training.proof.evaluation import prove_evaluation
from matex_data.training.proof.model import Proof, prove
from matex_data.training.replacements import replaced


def agreed_proof(channel: Channel, model: Any, proof: Proof) -> Proof:
    """Return a proof that holds on all ranks, which have to have traced the same graph. *Collective*."""
    extremes = np.array([not proof.proven, proof.fingerprint, -proof.fingerprint], np.int64)
    channel.host.reduce(extremes, "max")
    if proof.proven and extremes[0]:
        return Proof((Reason(model.name, "proof", "failed on another rank"),))
    if proof.proven and extremes[1] != -extremes[2]:
        return Proof((Reason(model.name, "code", "computes something else on another rank"),))
    return proof


class ForwardProofs:
    """Proofs that models compute each row of their data by itself, each made once.

    Parameters
    ----------
    channel : ranks that share the rows.
    report : messages about models that are not proven.
    """

    def __init__(self, channel: Channel, report: Report) -> None:
        self._channel, self._report = channel, report
        self._known: WeakKeyDictionary[Any, dict[str, bool]] = WeakKeyDictionary()

    def proven(self, model: Any, x: Any, y: Any = None, sample_weight: Any = None, step: Any = None) -> bool:
        """Return whether a model is proven for such data; the same on all ranks. *Collective* at first.

        Parameters
        ----------
        x, y, sample_weight : data as for ``evaluate``, or specs; ``predict`` has no targets.
        step : ``test_step`` of the model's own; None: its forward pass and its losses are proven.
        """
        if not model.built:  # its first call builds it, and creates what it needs
            return False
        specs = _specs(model, x, y, sample_weight)
        known = self._known.setdefault(model, {})
        key = f"{specs} {model.trainable} {step is not None}"
        if key not in known:
            proof = Proof((Reason(model.name, "input", "is not known beforehand"),))
            if specs is not None and step is not None:
                proof = prove_evaluation(model, step, *specs)
            elif specs is not None:
                with contextlib.nullcontext() if y is not None else replaced(model, _compile_loss=None):
                    proof = prove(model, *specs)
            proof = agreed_proof(self._channel, model, proof)
            known[key] = proof.proven
            if not proof.proven:
                self._report.computes_whole(model, proof)
        return known[key]


def _specs(model: Any, x: Any, y: Any, sample_weight: Any) -> tuple[Any, Any, Any] | None:
    """Return the specs of the data; None if they are not known."""
    if isinstance(x, tf.data.Dataset):
        leaves = [None if isinstance(leaf, tf.OptionalSpec) else leaf for leaf in tf.nest.flatten(x.element_spec)]
        spec = tf.nest.pack_sequence_as(x.element_spec, leaves)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(spec)
        return x, y, sample_weight
    leaves = [leaf for leaf in tf.nest.flatten((x, y, sample_weight)) if leaf is not None]
    if all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves):
        x, y, sample_weight = tf.nest.map_structure(_spec, (x, y, sample_weight))
        return x, y, sample_weight
    return None


def _spec(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, tf.TensorSpec):
        return leaf
    dtype = tf.as_dtype(leaf.dtype)
    return tf.TensorSpec([None, *leaf.shape[1:]], tf.float32 if dtype == tf.float64 else dtype)
