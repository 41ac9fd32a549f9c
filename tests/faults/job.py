"""One rank of a faulty job: ``python job.py FAULT KIND FOLDER``. It logs its actions and errors."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import h5py
import numpy as np
from mpi4py import MPI

import matex_data as md
from tests.faults import files
from tests.support import shared_memory

LONG = 3.0
"""Sleep of a late rank, as a multiple of ``MATEX_TIMEOUT``."""
AT = 3
"""Number of batches before the fault."""

Body = Callable[["Job"], None]


class Job:
    """This rank, the file that it reads, and its log."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.comm = MPI.COMM_WORLD
        self.rank, self.size = self.comm.rank, self.comm.size
        self.kind, self.folder = kind, folder
        self.path = folder / files.name(kind)
        self.timeout = float(os.environ["MATEX_TIMEOUT"])
        self._notes = (folder / f"rank{self.rank}.notes").open("a")

    @property
    def bad(self) -> bool:
        """Return whether this rank has the fault; rank 0 never has."""
        return self.rank == 1

    def note(self, what: str, **facts: Any) -> None:
        self._notes.write(json.dumps({"what": what, "time": time.time(), **facts}) + "\n")
        self._notes.flush()

    def inject(self, whose: str = "rank") -> None:
        """Log the time of the fault; ``whose`` is "rank" for a fault of this rank, "file" for one of all ranks."""
        self.note("fault", whose=whose)

    def open(self, **options: Any) -> md.Dataset:
        return md.open_dataset(options.pop("path", self.path), **{"window_bytes": 1 << 15, **options})

    def take(self, element: Any, epoch: int = 0) -> None:
        """Compare a batch with the expected values, and log its rows."""
        values = files.matrix(element)
        rows = np.asarray(values[:, 0]).astype(np.int64)
        right = bool(np.array_equal(values, files.truth(rows)))
        self.note("data" if right else "wrong", epoch=epoch, rows=rows.tolist())

    def epochs(
        self, batches: Iterable[Any], count: int = 2, fault: Callable[[], Any] | None = None, first: int = 0
    ) -> None:
        """Iterate over the batches; the faulty rank has its fault in epoch 0."""
        for epoch in range(first, first + count):
            for number, element in enumerate(batches):
                self.take(element, epoch)
                if fault is not None and self.bad and epoch == 0 and number == AT:
                    self.inject()
                    fault()

    def damage(self, harm: Callable[[], Any]) -> None:
        """Damage the file on rank 0, while the other ranks wait."""
        if self.rank == 0:
            harm()
        self.comm.Barrier()
        if self.rank == 0:
            self.inject("file")

    def sleep(self, times: float = LONG) -> None:
        time.sleep(times * self.timeout)


def main(fault: str, kind: str, folder: Path) -> None:
    """Run the function of the fault, and log how it ends; raise its error again."""
    job = Job(kind, folder)
    warnings.simplefilter("ignore")
    _warm(job)
    job.comm.Barrier()
    shared_memory.unlink()
    job.note("start")
    try:
        BODIES[fault](job)
    except BaseException as error:
        kinds = [cls.__name__ for cls in type(error).__mro__]
        job.note("error", kinds=kinds, text=str(error))
        raise
    job.note("end")


def _warm(job: Job) -> None:
    """Compile and import the code for this kind of file, so that its time does not count."""
    place = job.folder / f"warm{job.rank}" / job.path.name
    place.parent.mkdir(exist_ok=True)
    files.write(place, job.kind)
    data = md.open_dataset(place, comm=MPI.COMM_SELF)
    data.load()
    for _ in data.batches(files.BATCH):
        pass


# ---- files


def truncated_before(job: Job) -> None:
    job.damage(lambda: files.truncate(job.path))
    job.epochs(job.open().batches(files.BATCH))


def truncated_after(job: Job) -> None:
    data = job.open()
    job.damage(lambda: files.truncate(job.path))
    job.epochs(data.batches(files.BATCH))


def truncated_after_load(job: Job) -> None:
    data = job.open()
    job.damage(lambda: files.truncate(job.path))
    job.take(data.load())


def truncated_between(job: Job) -> None:
    batches = job.open().batches(files.BATCH)
    job.epochs(batches, 1)
    job.comm.Barrier()
    job.damage(lambda: files.truncate(job.path))
    job.epochs(batches, 1)


def corrupt(job: Job) -> None:
    job.damage(lambda: files.corrupt(job.path, job.kind))
    job.epochs(job.open().batches(files.BATCH))


def corrupt_load(job: Job) -> None:
    job.damage(lambda: files.corrupt(job.path, job.kind))
    job.take(job.open().load())


def corrupt_handled(job: Job) -> None:
    """Catch the error on all ranks, and read another file."""
    other = job.path.with_name("good" + job.path.suffix)
    if job.rank == 0:
        files.write(other, job.kind)
    job.damage(lambda: files.corrupt(job.path, job.kind))
    try:
        for _ in job.open().batches(files.BATCH):
            pass
    except md.DataError as error:
        job.note("caught", kinds=[cls.__name__ for cls in type(error).__mro__], text=str(error))
    job.epochs(job.open(path=other).batches(files.BATCH), 1)


def missing(job: Job) -> None:
    job.inject("file")
    job.open(path=[job.path, job.path.with_name("nowhere" + job.path.suffix)])


def removed(job: Job) -> None:
    data = job.open()
    job.damage(job.path.unlink)
    job.epochs(data.batches(files.BATCH))


def replaced(job: Job) -> None:
    data = job.open()
    job.damage(lambda: files.replace(job.path, job.kind))
    job.epochs(data.batches(files.BATCH))


def replaced_between(job: Job) -> None:
    batches = job.open().batches(files.BATCH)
    job.epochs(batches, 1)
    job.comm.Barrier()
    job.damage(lambda: files.replace(job.path, job.kind))
    job.epochs(batches, 1)


def forbidden(job: Job) -> None:
    """Remove the permission to read; as root, change the user for it."""
    job.open()  # imports all modules
    job.damage(lambda: job.path.chmod(0))
    if os.geteuid() == 0:
        os.seteuid(65534)
    try:
        job.epochs(job.open().batches(files.BATCH))
    finally:
        if os.getuid() == 0:
            os.seteuid(0)


def empty_file(job: Job) -> None:
    job.damage(lambda: os.truncate(job.path, 0))
    job.epochs(job.open().batches(files.BATCH))


# ---- what one rank does


def raise_in_loop(job: Job) -> None:
    job.epochs(job.open().batches(files.BATCH), fault=_fail)


def raise_before_open(job: Job) -> None:
    if job.bad:
        job.inject()
        _fail()
    job.epochs(job.open().batches(files.BATCH))


def raise_before_load(job: Job) -> None:
    data = job.open()
    if job.bad:
        job.inject()
        _fail()
    job.take(data.load())


def raise_between_epochs(job: Job) -> None:
    batches = job.open().batches(files.BATCH)
    job.epochs(batches, 1)
    if job.bad:
        job.inject()
        _fail()
    job.epochs(batches, 1)


def leave_loop(job: Job) -> None:
    """Continue to the end of the epoch, which is no error of this rank."""
    for number, element in enumerate(job.open().batches(files.BATCH)):
        job.take(element)
        if job.bad and number == AT:
            job.inject()
            break


def exit_0(job: Job) -> None:
    job.epochs(job.open().batches(files.BATCH), fault=lambda: sys.exit(0))


def exit_3(job: Job) -> None:
    job.epochs(job.open().batches(files.BATCH), fault=lambda: sys.exit(3))


def exit_0_before_open(job: Job) -> None:
    if job.bad:
        job.inject()
        sys.exit(0)
    job.open()


def leave_hard(job: Job) -> None:
    job.epochs(job.open().batches(files.BATCH), fault=lambda: os._exit(0))


def killed(job: Job) -> None:
    job.epochs(job.open().batches(files.BATCH), fault=lambda: os.kill(os.getpid(), signal.SIGKILL))


def crashed(job: Job) -> None:
    job.epochs(job.open().batches(files.BATCH), fault=lambda: os.kill(os.getpid(), signal.SIGSEGV))


def stopped(job: Job) -> None:
    job.epochs(job.open().batches(files.BATCH), fault=lambda: os.kill(os.getpid(), signal.SIGSTOP))


def stopped_before_open(job: Job) -> None:
    if job.bad:
        job.inject()
        os.kill(os.getpid(), signal.SIGSTOP)
    job.open()


def late_for_open(job: Job) -> None:
    _late(job)
    job.open()


def late_in_loop(job: Job) -> None:
    job.epochs(job.open().batches(files.BATCH), fault=job.sleep)


def late_for_batches(job: Job) -> None:
    data = job.open()
    _late(job)
    job.epochs(data.batches(files.BATCH))


def late_for_seed(job: Job) -> None:
    data = job.open()
    _late(job)
    job.epochs(data.batches(files.BATCH, shuffle=True))


def late_for_statistics(job: Job) -> None:
    data = job.open()
    _late(job)
    data.statistics()


def late_for_load(job: Job) -> None:
    data = job.open()
    _late(job)
    job.take(data.load())


def late_for_drop(job: Job) -> None:
    job.open()
    _late(job)
    job.open(missing="drop")


def other_field(job: Job) -> None:
    if job.bad:
        job.inject("file")
    job.epochs(job.open(inputs=["nonsense" if job.bad else "x"]).batches(files.BATCH))


def other_format(job: Job) -> None:
    if job.bad:
        job.inject("file")
    job.epochs(job.open(format="csv" if job.bad else None).batches(files.BATCH))


def unknown_option(job: Job) -> None:
    job.inject("file")
    job.open(no_such_option=1)


def other_method(job: Job) -> None:
    data = job.open()
    if job.bad:
        job.inject("file")
        data.statistics()
    else:
        job.take(data.load())


def other_loop(job: Job) -> None:
    data = job.open()
    if job.bad:
        job.inject("file")
        job.take(data.load())
    else:
        job.epochs(data.batches(files.BATCH))


def other_batch_size(job: Job) -> None:
    data = job.open()
    if job.bad:
        job.inject("file")
    job.epochs(data.batches(files.BATCH * (2 if job.bad else 1)))


def other_epochs(job: Job) -> None:
    """Begin one more epoch on one rank, which the other ranks do not."""
    batches = job.open().batches(files.BATCH)
    job.epochs(batches, 1)
    if job.rank == 0:
        job.inject("others")
        job.epochs(batches, 1)


def no_memory(job: Job) -> None:
    """Read half a gigabyte of zeros (a sparse file) with a limit of a fifth of that on one rank."""
    path = job.path.with_name("large.h5")
    if job.rank == 0:
        with h5py.File(path, "w") as file:
            file.create_dataset("x", (1 << 20, 64), "i8", chunks=(1 << 12, 64))
    job.comm.Barrier()
    data = job.open(path=path, window_bytes=1 << 22)
    if job.bad:
        job.inject("file")
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + (100 << 20), size + (100 << 20)))
    data.load()


def two_threads(job: Job) -> None:
    data = job.open()
    job.inject("file")
    errors: list[BaseException] = []
    begin = threading.Barrier(2)  # otherwise one may end before the other begins

    def loop() -> None:
        begin.wait()
        try:
            job.epochs(data.batches(files.BATCH), 1)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=loop) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def forked(job: Job) -> None:
    """Read in a child of each rank and in the rank; the child reads the right data, or raises at once."""
    data = job.open(io="independent")
    batches = data.batches(files.BATCH)
    job.epochs(batches, 1)
    job.comm.Barrier()
    job.inject("file")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            loaded = data.load()
            rows = files.matrix(loaded)
            code = 0 if np.array_equal(rows, files.truth(np.asarray(rows[:, 0]).astype(np.int64))) else 2
        except md.DataError as error:
            print("in the child:", error, file=sys.stderr)
            code = 0
        except BaseException as error:
            print("in the child:", repr(error), file=sys.stderr)
        finally:
            sys.stderr.flush()
            os._exit(code)
    end = time.monotonic() + job.timeout
    status = 0
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError("the child hangs")
        time.sleep(0.02)
    status = os.waitstatus_to_exitcode(done[1])
    assert status == 0, f"the child ended with {status}"
    job.epochs(batches, 1, first=1)


# ---- nothing is wrong


def slow_in_loop(job: Job) -> None:
    """Sleep for less than the limit."""
    job.epochs(job.open().batches(files.BATCH), fault=lambda: job.sleep(0.6))


def held_iterator(job: Job) -> None:
    """Leave the loop on all ranks, keep the iterator, and sleep for longer than the limit."""
    batches = iter(job.open().batches(files.BATCH))
    for _ in range(AT):
        job.take(next(batches))
    job.inject("file")
    job.sleep(1.5 if job.rank == 0 else 0.2)
    job.comm.Barrier()


def early_leavers(job: Job) -> None:
    """Sleep between the last batches of rank 0, long after the other programs have ended."""
    batches = iter(job.open().batches(files.BATCH))
    for element in batches:
        job.take(element)
    job.inject("file")
    if job.rank == 0:
        job.sleep(1.5)


def work_between(job: Job) -> None:
    """Sleep on all ranks between two epochs, for longer than the limit."""
    batches = job.open().batches(files.BATCH)
    job.epochs(batches, 1)
    job.inject("file")
    job.sleep(1.3)
    job.epochs(batches, 1, first=1)


def resumed(job: Job) -> None:
    """Kill the first run within an epoch; continue from its state in the second, on another number of ranks."""
    notes = job.folder / "state.json"
    data = job.open()
    options: dict[str, Any] = {"shuffle": True, "seed": 3}
    done = 2 * AT
    if not notes.exists():
        for number, element in enumerate(data.batches(files.BATCH, **options)):
            job.take(element)
            if number + 1 == done:
                job.comm.Barrier()
                if job.rank == 0:
                    notes.write_text(json.dumps(data.state(done)))
                    job.inject()
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)
    job.epochs(data.batches(files.BATCH, **options, start=json.loads(notes.read_text())), 1)


# ---- training


def _model() -> Any:
    import keras

    keras.utils.set_random_seed(1)
    layers = [keras.layers.Rescaling(1e-4), keras.layers.Dense(256), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((files.WIDTH,)), *layers])
    model.compile("sgd", "mse")
    return model


def _train(job: Job, *callbacks: Any, rows: int | None = None, **options: Any) -> None:
    import tensorflow as tf

    from matex_data import training

    def pairs(element: Mapping[str, Any]) -> Any:
        x = tf.cast(element["x"], tf.float32)
        return x, x[:, :1] * 1e-4

    data = options.pop("data", None)
    if data is None:
        data = job.open().tf_dataset(files.BATCH).map(pairs)
    training.fit(_model(), data, epochs=2, callbacks=list(callbacks), verbose=0, **options)


def _callback(
    job: Job, rank: int, act: Callable[[], Any], when: str = "on_train_batch_end", whose: str = "rank"
) -> Any:
    import keras

    class Act(keras.callbacks.Callback):  # type: ignore[misc]
        """Callback that calls a function once, on one rank."""

        done = False

        def _act(self, *_: Any) -> None:
            if self.done or job.rank not in (rank, rank % job.size):
                return
            self.done = True
            job.inject(whose)
            act()

    setattr(
        Act, when, lambda self, number, logs=None: self._act() if number >= (AT if "batch" in when else 0) else None
    )
    return Act()


def callback_raises(job: Job) -> None:
    _train(job, _callback(job, 1, _fail))


def callback_exits(job: Job) -> None:
    _train(job, _callback(job, 1, lambda: sys.exit(0)))


def callback_leaves_hard(job: Job) -> None:
    _train(job, _callback(job, 1, lambda: os._exit(0)))


def killed_in_training(job: Job) -> None:
    _train(job, _callback(job, 1, lambda: os.kill(os.getpid(), signal.SIGKILL)))


def stopped_in_training(job: Job) -> None:
    _train(job, _callback(job, 1, lambda: os.kill(os.getpid(), signal.SIGSTOP)))


def late_in_training(job: Job) -> None:
    _train(job, _callback(job, 1, job.sleep))


def step_raises(job: Job) -> None:
    import tensorflow as tf

    taken = [0]

    def harm(x: Any) -> Any:
        taken[0] += 1
        if job.bad and taken[0] == AT:
            job.inject()
            _fail()
        return x

    def pairs(element: Mapping[str, Any]) -> Any:
        x = tf.cast(element["x"], tf.float32)
        x = tf.ensure_shape(tf.numpy_function(harm, [x], tf.float32), x.shape)
        return x, x[:, :1] * 1e-4

    _train(job, data=job.open().tf_dataset(files.BATCH).map(pairs))


def generator_raises(job: Job) -> None:
    import tensorflow as tf

    def generate() -> Any:
        for number in range(16):
            if job.bad and number == AT:
                job.inject()
                _fail()
            yield np.ones((4, files.WIDTH), np.float32), np.ones((4, 1), np.float32)

    spec = (tf.TensorSpec((4, files.WIDTH)), tf.TensorSpec((4, 1)))
    data = tf.data.Dataset.from_generator(generate, output_signature=spec)
    _train(job, data=data.apply(tf.data.experimental.assert_cardinality(16)))


def file_in_training(job: Job) -> None:
    _model()  # so that TensorFlow is there
    job.damage(lambda: files.corrupt(job.path, job.kind))
    _train(job)


def _in_stages(job: Job, *callbacks: Any, parts: int = 1, harm: Callable[[Any], Any] | None = None) -> None:
    """Train in two stages.

    Parameters
    ----------
    parts : into which the layers of each stage are cut.
    harm : function of arrays, within a layer of the second stage.
    """
    import keras
    import tensorflow as tf

    from matex_data import training

    class Harmed(keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return tf.ensure_shape(tf.numpy_function(harm, [x], tf.float32), x.shape)

    keras.utils.set_random_seed(1)
    wide = [keras.layers.Dense(64, name="wide0"), keras.layers.Dense(64, name="wide1")]
    if harm is not None:
        wide.append(Harmed())
    layers = [keras.Input((files.WIDTH,)), keras.layers.Rescaling(1e-4), *wide, keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    mesh = training.Mesh(stages=2, model=parts)
    mesh.layout_map()[".*wide./kernel"] = (None, "model")
    data = job.open(comm=mesh.data).tf_dataset(files.BATCH)
    pairs = data.map(lambda element: (tf.cast(element["x"], tf.float32), element["x"][:, :1] * 0))
    options = {"mesh": mesh, "micro_batches": 2, "split_after": ["wide0"], "callbacks": list(callbacks)}
    training.fit(model, pairs, epochs=2, verbose=0, **options)


def callback_of_stage_raises(job: Job) -> None:
    _in_stages(job, _callback(job, 1, _fail))


def callback_of_stage_exits(job: Job) -> None:
    _in_stages(job, _callback(job, 1, lambda: sys.exit(0)))


def killed_stage(job: Job) -> None:
    _in_stages(job, _callback(job, 1, lambda: os.kill(os.getpid(), signal.SIGKILL)))


def stopped_stage(job: Job) -> None:
    _in_stages(job, _callback(job, 1, lambda: os.kill(os.getpid(), signal.SIGSTOP)))


def _step_raises(job: Job, rank: int) -> Callable[[Any], Any]:
    taken = [0]

    def harm(x: Any) -> Any:
        taken[0] += 1
        if job.rank == rank and taken[0] == AT:
            job.inject("rank" if job.size > 2 else "file")
            _fail()
        return x

    return harm


def step_of_stage_raises(job: Job) -> None:
    _in_stages(job, harm=_step_raises(job, 1))


def step_of_one_rank_raises(job: Job) -> None:
    _in_stages(job, parts=2, harm=_step_raises(job, 3))


def file_of_stage(job: Job) -> None:
    _model()  # so that TensorFlow is there
    job.damage(lambda: files.corrupt(job.path, job.kind))
    _in_stages(job)


def unequal_steps(job: Job) -> None:
    import tensorflow as tf

    _model()
    job.comm.Barrier()
    job.inject("file")
    ones = np.ones((16 + 4 * job.rank, files.WIDTH), np.float32), np.ones((16 + 4 * job.rank, 1), np.float32)
    _train(job, data=tf.data.Dataset.from_tensor_slices(ones).batch(4, drop_remainder=True))


def slow_callback(job: Job) -> None:
    _train(job, _callback(job, 0, lambda: job.sleep(1.5), "on_epoch_end", "file"))


def slow_save(job: Job) -> None:
    """Delay the first checkpoint."""
    write_out = os.fsync

    def slowly(handle: Any) -> None:
        os.fsync = write_out
        job.inject("file")
        job.sleep(1.5)
        write_out(handle)

    os.fsync = slowly
    _train(job, checkpoint=job.folder / "checkpoint")


def disk_full(job: Job) -> None:
    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))

    _train(job, _callback(job, 0, fill, "on_epoch_end", "file"), checkpoint=job.folder / "checkpoint")


def damaged_checkpoint(job: Job) -> None:
    folder = job.folder / "checkpoint"
    if not folder.exists():
        job.comm.Barrier()
        _train(job, checkpoint=folder)
        job.comm.Barrier()
    job.damage(lambda: files.corrupt(next(p for p in sorted(folder.iterdir()) if p.is_file()), "bytes"))
    _train(job, checkpoint=folder)


def _fail() -> NoReturn:
    raise ValueError("this rank fails")


def _late(job: Job) -> None:
    if job.bad:
        job.inject()
        job.sleep()


BODIES: dict[str, Body] = {name: value for name, value in globals().items() if callable(value) and name.islower()}

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
