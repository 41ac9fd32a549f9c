"""Costs of a script for ``matex plan --train``: of a few steps of its first ``fit`` in this process, which then ends.

The script runs like ``matex run`` on one rank. Neither callbacks nor what follows ``fit`` run: nothing is saved there.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from matex_data import machine
from matex_data.errors import DataError

STEPS, LEAST_STEPS = 20, 3
STEP_SECONDS = 8.0  # for the steps of one number of rows
LONG_STEP = 60.0  # seconds of a step, from which one of more rows is not measured
DATA_SECONDS = 4.0
MEMORY_BYTES = 1 << 24  # of each array; those of the caches would be faster than gradients are


class Buckets:
    """Buckets of the gradients of a step, and when each is ready.

    Attributes
    ----------
    nbytes : of each bucket; half of those of slices, which all ranks gather: a sum sends twice its bytes.
    times : when each bucket was ready last, by ``time.perf_counter``.
    """

    def __init__(self) -> None:
        self.nbytes: dict[int, float] = {}
        self.times: dict[int, float] = {}

    def apply(self, original: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
        """Note when each bucket of the gradients is ready, and apply these."""
        import tensorflow as tf

        from matex_data.training.reduction.buckets import plan_buckets, sum_dtype

        gradients = list(gradients)
        dense = [x for x in gradients if isinstance(x, tf.Tensor)]
        dtypes = [np.dtype(x.dtype.as_numpy_dtype) for x in dense]
        sizes = [x.shape.num_elements() or 0 for x in dense]
        groups = [
            ([dense[i] for i in bucket.positions], sum(sizes[i] for i in bucket.positions) * bucket.dtype.itemsize)
            for bucket in plan_buckets(sizes, dtypes)
        ]
        for sparse in (x for x in gradients if isinstance(x, tf.IndexedSlices)):
            itemsize = sum_dtype(np.dtype(sparse.dtype.as_numpy_dtype)).itemsize
            groups.append(([sparse.values], tf.size(sparse.values) * itemsize // 2))
        for number, (tensors, nbytes) in enumerate(groups):
            with tf.control_dependencies(tensors):
                tf.numpy_function(functools.partial(self._note, number), [nbytes], [])
        return original(gradients, *args, **kwargs)

    def _note(self, number: int, nbytes: Any) -> None:
        self.nbytes[number], self.times[number] = float(nbytes), time.perf_counter()


class Measurement:
    """Costs of the first model that a script trains.

    Parameters
    ----------
    result : file that they are written to, as JSON of the parameters of ``matex_data.cli.scaling.Measured``.
    begin : when the process was started, in seconds since the epoch.
    ranks : numbers of ranks among which a batch will be shared out.
    """

    def __init__(self, result: Path, begin: float, ranks: Sequence[int]) -> None:
        self._result, self._begin, self._ranks = result, begin, ranks
        self._buckets = Buckets()
        self._iterator: Any = None

    def patch(self) -> None:
        """Let ``keras.Model.fit`` measure and end the process."""
        import keras

        from matex_data.training.keras_api import EpochIterator, keras_trainer
        from matex_data.training.replacements import Replacements, patch

        def iterator(*args: Any, **kwargs: Any) -> Any:
            self._iterator = EpochIterator(*args, **kwargs)
            return self._iterator

        def fit(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            options = dict(inspect.signature(original).bind(model, *args, **kwargs).arguments)
            model = options.pop("self")
            model.jit_compile = False  # as on several ranks
            model.steps_per_execution = 1
            replacements = Replacements()
            make, apply = model.make_train_function, model.optimizer.apply
            replacements.set(model.optimizer, "apply", functools.partial(self._buckets.apply, apply))

            def measured() -> None:
                make(force=True)
                self._measure(model, options.get("x"))

            replacements.set(model, "make_train_function", measured)
            keras_trainer.TFEpochIterator = iterator
            if options.pop("validation_data", None) is not None:
                options.pop("validation_split", None)  # which Keras then ignores
            return original(model, **{**options, "callbacks": None, "verbose": 0})

        patch(keras.Model, fit, "fit")

    def _measure(self, model: Any, x: Any) -> None:
        """Measure data and steps, write the costs, and end this process."""
        from matex_data.training.exact.rows import batch_size, is_sharded

        costs: dict[str, Any] = {"start": time.time() - self._begin}
        batch, of_data = self._data_costs()
        rows = batch_size(batch)
        if rows is None:
            raise DataError("the batches of this script have no rows, which ranks would share out", expected="tensors")
        rows = int(rows)
        times: dict[int, list[float]] = {}
        for count in sorted({rows, *(-(-rows // ranks) for ranks in self._ranks)}):
            if times and np.median(times[max(times)]) * count / max(times) > LONG_STEP:
                break
            (first, *times[count]), ready = self._step_times(model, batch, count)
            costs["start"] += first if len(times) == 1 else 0.0
        found = self._buckets.nbytes
        buckets = [(round(found[number]), float(np.median(ready[number]))) for number in sorted(found)]
        steps = self._iterator.steps_per_epoch or self._iterator._num_batches
        costs |= {"cores": machine.cores(), "batch": rows, "steps": steps, "times": times, "buckets": buckets}
        costs |= {"memory": _memory_cost(), "sharded": is_sharded(x), **of_data}
        self._result.write_text(json.dumps(costs))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # nothing that follows fit saves what these steps have changed

    def _data_costs(self) -> tuple[Any, dict[str, Any]]:
        """Return the first batch, and costs of a row of the data, which come as fast as they can.

        Those of the second pass, if the first one ends in time: data that are cached cost less in all passes but one.
        """
        first, costs, ended = self._pass_costs()
        if first is None:
            raise DataError("the data of this script have no batch", expected="one batch at least")
        again, later, _ = self._pass_costs() if ended else (None, {}, False)
        if again is None:  # as of a generator
            return first, costs
        if later["file_bytes"] is None and costs["file_bytes"] is not None:
            later["file_bytes"] = 0.0
        return first, later

    def _pass_costs(self) -> tuple[Any, dict[str, Any], bool]:
        """Return the first batch of a pass over the data, costs of a row, and whether it came to its end in time."""
        import tensorflow as tf

        from matex_data.io.counters import process_profile
        from matex_data.training.checking.batches import until_out_of_range, without_optionals
        from matex_data.training.exact.rows import batch_size

        before = process_profile().bytes, process_profile().samples
        begin, cpu, rows, first, ended = time.perf_counter(), time.process_time(), 0, None, True
        for batch in until_out_of_range(iter(self._iterator._distributed_dataset)):
            batch = tf.nest.map_structure(without_optionals, batch)
            first = batch if first is None else first
            rows += int(batch_size(batch) or 0)
            if time.perf_counter() - begin > DATA_SECONDS:
                ended = False
                break
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        after = process_profile().bytes, process_profile().samples
        samples = after[1] - before[1]
        of_files = (after[0] - before[0]) / samples if samples else None
        costs = {"data": seconds / max(1, rows), "data_cpu": cpu / max(1, rows), "file_bytes": of_files}
        return first, costs, ended

    def _step_times(self, model: Any, batch: Any, rows: int) -> tuple[list[float], dict[int, list[float]]]:
        """Return the seconds of steps on the first rows of a batch, of which the first one is traced.

        Return also when each bucket was ready in the others, as fractions of a step.
        """
        import tensorflow as tf

        from matex_data.training.exact.rows import leaves_per_sample, rows_between
        from matex_data.training.keras_api import pythonify_logs

        shard = rows_between(batch, 0, rows, leaves_per_sample(self._iterator._distributed_dataset.element_spec))
        batches = iter(tf.data.Dataset.from_tensors(shard).repeat())
        times: list[float] = []
        ready: dict[int, list[float]] = {}
        # With one core that is the time without other programs, which would take their share of it.
        alone = machine.cores() == 1 and not tf.config.list_physical_devices("GPU")
        clock = time.process_time if alone else time.perf_counter
        while len(times) <= LEAST_STEPS or (len(times) <= STEPS and sum(times[1:]) < STEP_SECONDS):
            begin, start = time.perf_counter(), clock()
            pythonify_logs(model.train_function(batches))  # a GPU ends its step before its logs are known
            times.append(clock() - start)
            seconds = time.perf_counter() - begin
            for number, stamp in self._buckets.times.items() if len(times) > 1 else ():
                ready.setdefault(number, []).append((stamp - begin) / seconds)
        return times, ready


def _memory_cost() -> float:
    """Return the seconds to add a byte of one array to another."""
    target, source = (np.ones(MEMORY_BYTES // 4, np.float32) for _ in range(2))
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        target += source
        seconds.append(time.perf_counter() - begin)
    return float(np.median(seconds)) / target.nbytes


def main() -> None:
    """Run a script until its first ``fit`` is measured, with the cores of one rank of this machine."""
    from matex_data.training.launcher.run import run

    result, begin, on_node, ranks, script, *arguments = sys.argv[1:]
    if hasattr(os, "sched_setaffinity"):
        own = sorted(machine.core_numbers())
        os.sched_setaffinity(0, own[: max(1, len(own) // int(on_node))])
    Measurement(Path(result), float(begin), [int(on_node), int(ranks)]).patch()
    run(script, arguments)


if __name__ == "__main__":
    main()
