"""Interrupts while attributes are replaced and restored, at every line: a model is as it was."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from tests.support.ranks import Pool

LEAVING = ("__exit__", "restore", "suspend")
"""Functions that Python does not call again if an interrupt comes at their first line."""


def interrupted_at_every_line(files: tuple[str, ...], run: Callable[[], Any], check: Callable[[int], None]) -> int:
    """Run a function again and again, with an interrupt one line later each time; return the number of lines."""
    number = 0
    while True:
        left = [number]

        def trace(frame: FrameType, event: str, argument: Any, left: list[int] = left) -> Any:
            if not frame.f_code.co_filename.endswith(files):
                return None
            if event == "call" and frame.f_code.co_name in LEAVING:
                return lambda *_: trace  # from its second line on
            if event == "line":
                left[0] -= 1
                if left[0] == -1:
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            run()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        if left[0] >= 0:
            return number
        check(number)
        number += 1


def patches_after_interrupts(comm: Any) -> int:
    import keras
    import tensorflow as tf

    from matex_data.training.average.optimizer import GradientPatches
    from matex_data.training.comm.channel import open_channel
    from matex_data.training.distributed_model import DistributedModel

    channel, gradient = open_channel(comm), tf.GradientTape.gradient
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(), "mse")
    attributes = set(vars(model)), set(vars(model.optimizer))

    def train() -> None:
        with DistributedModel(model, channel) as distributed, GradientPatches(distributed.average):
            pass

    def check(number: int) -> None:
        assert (set(vars(model)), set(vars(model.optimizer))) == attributes, number
        assert tf.GradientTape.gradient is gradient, number

    files = ("training/distributed_model.py", "training/replacements.py", "training/average/optimizer.py")
    return interrupted_at_every_line(files, train, check)


@pytest.mark.rank_counts(2)
def test_an_interrupt_leaves_no_patch(pool: Pool) -> None:
    assert min(pool.run(patches_after_interrupts)) > 100


def patches_of_stages_after_interrupts(comm: Any) -> int:
    import keras

    from matex_data.training.model_parallel.mesh import Mesh
    from matex_data.training.model_parallel.stages.model import StagedModel

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(), "mse")
    mesh, attributes = Mesh(comm=comm, stages=2), set(vars(model))

    def train() -> None:
        with StagedModel(model, mesh):
            pass

    def check(number: int) -> None:
        assert set(vars(model)) == attributes, number

    return interrupted_at_every_line(("stages/model.py",), train, check)


@pytest.mark.rank_counts(2)
def test_an_interrupt_leaves_no_patch_of_stages(pool: Pool) -> None:
    assert min(pool.run(patches_of_stages_after_interrupts)) > 30
