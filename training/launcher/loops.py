"""Custom training loops of scripts under the launcher.

A loop over the script's own data runs with whole batches on every rank, as in one process, and averages nothing: the
launcher cannot determine which data a loop trains on, nor the divisor of its loss. Gradients of sharded data are
averaged.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import keras
import tensorflow as tf

from matex_data.locks import setting
from matex_data.training.average.optimizer import GradientAverage, GradientPatches
from matex_data.training.comm.channel import Channel
from matex_data.training.compat import in_session_graph
from matex_data.training.exact.batch_weights import left_to_keras, patch_iteration
from matex_data.training.exact.state import in_step
from matex_data.training.keras_api import ORDERED
from matex_data.training.launcher.root import say_once
from matex_data.training.reduction.graphs import compiled_by_xla, eager_variable
from matex_data.training.reduction.ops import Reducer, broadcast_from_root
from matex_data.training.replacements import patch


class LoopPatches:
    """Patches of gradient tapes and of all optimizers, for custom training loops. *Collective*.

    Parameters
    ----------
    check : raises an error if loops of the script's own cannot train now.
    """

    def __init__(self, channel: Channel, reducer: Reducer, check: Callable[[], None] = lambda: None) -> None:
        self.channel = channel
        self._check = check
        self.average = GradientAverage(reducer)
        self._guard: Any = None
        self._broadcast_flags: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by optimizer
        GradientPatches(self.average, self.is_active).__enter__()
        for cls in _classes_with_own("apply", keras.optimizers.Optimizer):
            patch(cls, self.apply, "apply")
        patch_iteration()
        channel.communicator.on_sharded_data(self._fail_guarded_graphs)

    def is_active(self) -> bool:
        """Return whether gradients are those of a shard now; warn once about a loop over whole batches."""
        if in_session_graph():
            return True  # the session decides when it runs
        if in_step() or left_to_keras():
            return False
        self._check()
        if not self.channel.communicator.sharded_data:
            self.warn_of_whole_batches()
            self._guard_graph()
        return self.channel.communicator.sharded_data

    def apply(self, original: Callable[..., Any], optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        """Apply gradients, averaged if they are those of a shard. *Collective* then."""
        state = self.average.state
        if state.averaged or not (state.running or self.is_active()):
            return original(optimizer, grads, trainable_variables)
        if trainable_variables is not None and not state.running:
            self._broadcast_once(optimizer, list(trainable_variables))
        with state.only_averages():
            return original(optimizer, self.average.applied(list(grads)), trainable_variables)

    def warn_of_whole_batches(self) -> None:
        """Warn once about a loop over whole batches."""
        say_once(
            self.channel.rank,
            "a training loop of this script runs with the whole batch on every rank: correct, but no faster than one "
            "process\n"
            "  remedy: loop over matex_data.training.shard(dataset), so that each rank trains on its rows",
        )

    def _guard_graph(self) -> None:
        """Make a graph that averages nothing raise an error once the program has sharded data."""
        if tf.executing_eagerly():
            return
        if self._guard is None:
            self._guard = eager_variable(True, tf.bool)
        tf.debugging.Assert(
            self._guard,
            [
                "this training step was traced before the data was sharded, so it does not average gradients\n"
                "  remedy: call matex_data.training.shard, open_dataset or tf_dataset before the first training step"
            ],
        )

    def _fail_guarded_graphs(self) -> None:
        if self._guard is not None:
            self._guard.assign(False)

    def _broadcast_once(self, optimizer: Any, variables: list[Any]) -> None:
        """Broadcast the variables of rank 0 in the first step; earlier they may be uninitialized. *Collective*."""
        if optimizer not in self._broadcast_flags:
            self._broadcast_flags[optimizer] = eager_variable(False, tf.bool)
        done = self._broadcast_flags[optimizer]

        def receive() -> Any:
            received = broadcast_from_root(self.channel, [tf.convert_to_tensor(v) for v in variables])
            for variable, value in zip(variables, received, strict=True):
                variable.assign(value)
            return done.assign(True)

        tf.cond(done, lambda: done.read_value(), receive)


def _classes_with_own(name: str, base: Any) -> list[Any]:
    """Return the class from which ``base`` inherits a method, and all subclasses that define their own."""
    classes = [cls for cls in base.__mro__ if name in vars(cls)][:1]
    pending = [base]
    while pending:
        cls = pending.pop()
        pending += cls.__subclasses__()
        if name in vars(cls) and cls not in classes:
            classes.append(cls)
    return classes


def patch_functions(rank: int) -> None:
    """Let ``tf.function`` leave XLA where a function averages gradients; rank 0 says so once."""
    text = "a function with jit_compile=True averages gradients over the ranks: it runs without XLA"

    def function(original: Any, func: Any = None, *args: Any, jit_compile: Any = None, **options: Any) -> Any:
        if not jit_compile:
            return original(func, *args, jit_compile=jit_compile, **options)
        if func is None:
            return functools.partial(function, original, *args, jit_compile=jit_compile, **options)
        make = functools.partial(original, func, *args, **options)
        return CompiledFunction(make, functools.partial(say_once, rank, text))

    patch(tf, function, "function")


def patch_pipelines() -> None:
    """Let pipelines of ``tf.data`` give their elements in order, also with ``deterministic=False``.

    In the order in which threads have them, each rank would make other batches: rows would be used twice, or never.
    """

    def in_order(original: Any, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs | ({"deterministic": "true"} if kwargs.get("deterministic") == "false" else {}))

    def with_options(original: Any, dataset: Any, options: Any, **kwargs: Any) -> Any:
        if options.deterministic is False:
            options = options.merge(tf.data.Options())  # a copy
            options.deterministic = True
        return original(dataset, options, **kwargs)

    for module, names in ORDERED:
        patch(module, in_order, *names)
    patch(tf.data.Dataset, with_options, "with_options")


class CompiledFunction:
    """Function of TensorFlow that XLA compiles, unless it communicates.

    Parameters
    ----------
    make : returns the function, given ``jit_compile``.
    notice : called when the function is traced without XLA.
    """

    def __init__(self, make: Callable[..., Any], notice: Callable[[], None]) -> None:
        self._make, self._notice = make, notice
        self._function = make(jit_compile=True)
        self._compiled = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; trace it again without XLA if it communicates."""
        if self._compiled:
            reasons: list[str] = []
            try:
                with setting(compiled_by_xla, reasons):
                    return self._function(*args, **kwargs)
            except Exception:
                if not reasons:
                    raise
            self._function, self._compiled = self._make(), False
            self._notice()
        return self._function(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)
