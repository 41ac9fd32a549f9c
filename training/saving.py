"""Files of scripts that know nothing of ranks: rank 0 writes them, and nobody goes on before they are there."""

from __future__ import annotations

import functools
from contextvars import ContextVar
from typing import Any

import keras
import tensorflow as tf

from matex_data import liveness
from matex_data.training.callbacks import WRITERS
from matex_data.training.channel import Channel

_alone: ContextVar[bool] = ContextVar("alone", default=False)
_HOOKS = ("on_train_begin", "on_train_batch_end", "on_epoch_begin", "on_epoch_end", "on_train_end", "on_test_end")


def patch_saving(opened: Channel) -> None:
    """Have rank 0 alone save models and write summaries."""
    for owner, name in (
        (keras.Model, "save"),
        (keras.Model, "save_weights"),
        (keras.Model, "export"),
        (keras.saving, "save_model"),
        (keras.models, "save_model"),
    ):
        setattr(owner, name, _by_root(getattr(owner, name), opened))
    for kind in WRITERS:  # they run on rank 0 alone, so what they save is waited for by nobody
        for name in _HOOKS:
            if name in vars(kind):
                setattr(kind, name, _marked(vars(kind)[name]))
    if opened.rank > 0:
        tf.summary.create_file_writer = lambda *_, **__: tf.summary.create_noop_writer()


def _by_root(original: Any, opened: Channel) -> Any:
    @functools.wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        if _alone.get():
            return original(*args, **kwargs)
        token = _alone.set(True)  # methods that save call one another
        try:
            with liveness.busy(f"{original.__name__}()"):
                return original(*args, **kwargs) if opened.rank == 0 else None
        finally:
            _alone.reset(token)
            opened.host.wait_for_all()

    return save


def _marked(original: Any) -> Any:
    @functools.wraps(original)
    def hook(*args: Any, **kwargs: Any) -> Any:
        token = _alone.set(True)
        try:
            return original(*args, **kwargs)
        finally:
            _alone.reset(token)

    return hook
