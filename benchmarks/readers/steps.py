"""Steps of training on two ranks: this project, its peers, and the same step without communication."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.harness.data import Task
from benchmarks.readers.ceiling import Pass
from benchmarks.readers.epochs_of_fit import passes

SHAPES = {"mlp": (784,), "cnn": (32, 32, 3), "deep": (64,)}
BATCH = {"mlp": 64, "cnn": 32, "deep": 32}
STEPS = {"mlp": 60, "cnn": 40, "deep": 60}
CLASSES = 10
LEAST_GRADIENTS = 1000  # elements of a bucket; metrics and agreement have fewer
PORT = 24_317  # below those that Linux gives to clients


def task_of(model: str) -> Task:
    """Return the task of a pass; a "sample" is a step of one rank."""
    return Task(model, "", "", BATCH[model], STEPS[model], 0, STEPS[model])


def _network(model: str) -> Any:
    import keras
    from keras import layers

    keras.utils.set_random_seed(0)
    if model == "mlp":
        hidden: list[Any] = [layers.Dense(1024, "relu"), layers.Dense(1024, "relu")]
    elif model == "cnn":
        convolutions = [layers.Conv2D(32, 3, activation="relu"), layers.Conv2D(64, 3, activation="relu")]
        hidden = [*convolutions, layers.MaxPooling2D(), layers.Flatten(), layers.Dense(128, "relu")]
    else:
        hidden = [layer for _ in range(60) for layer in (layers.Dense(64, "relu"), layers.BatchNormalization())]
    return keras.Sequential([keras.Input(SHAPES[model]), *hidden, layers.Dense(CLASSES)])


def _dataset(model: str, batch: int) -> Any:
    """Return batches of noise, of one epoch, in memory.

    There is nothing that automatic tuning could tune; it may delay the end of an epoch by seconds.
    """
    import tensorflow as tf

    rng, count = np.random.default_rng(0), STEPS[model] * batch
    x = rng.standard_normal((count, *SHAPES[model]), np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((x, rng.integers(0, CLASSES, count))).batch(batch, drop_remainder=True)
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def one_thread() -> None:
    """Let TensorFlow compute with one thread, for ranks that have one core each."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


def _loss_and_optimizer() -> tuple[Any, Any]:
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True), keras.optimizers.SGD(0.01)


def fit(task: Task, ranks: int = 1, replaced: str = "") -> Pass:
    """Run epochs of a plain Keras script, one for each pass.

    Parameters
    ----------
    ranks : that share a batch, which grows with them: 1 in a lone copy.
    replaced : what stands for the communication: "" for nothing, "nothing", "four bytes" or "copy".
    """
    one_thread()
    if replaced:
        _replace_reduction(replaced)
    model = _network(task.path)
    loss, optimizer = _loss_and_optimizer()
    model.compile(optimizer, loss)
    data = _dataset(task.path, task.batch_size * ranks)
    return passes(partial(model.fit, data, verbose=0), task.samples)


def _replace_reduction(replaced: str) -> None:
    """Let all reductions of gradients do less than they should, to measure the rest of a step."""
    from matex_data.training.comm.collectives import Collectives
    from matex_data.training.reduction.ops import Reducer

    if replaced == "nothing":
        Reducer.__call__ = lambda self, tensors, *args, **kwargs: list(tensors)  # type: ignore[method-assign]
        return
    whole = Collectives.reduce

    def reduce(self: Collectives, flat: Any, op: Any = "sum", met: bool = False) -> None:
        if flat.size < LEAST_GRADIENTS:
            whole(self, flat, op, met)
        elif replaced == "four bytes":
            whole(self, flat[:1], op, met)

    Collectives.reduce = reduce  # type: ignore[method-assign]


def by_tensor(task: Task) -> Pass:
    """MaTEx's way: each gradient is copied to NumPy, reduced by a call of its own, and copied back."""
    from mpi4py import MPI

    def average(gradient: Any) -> Any:
        out = np.array(gradient)
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, out)
        return out / MPI.COMM_WORLD.size

    return _loop(task, lambda gradients: _each(average, gradients))


def _each(average: Callable[[Any], Any], gradients: Sequence[Any]) -> list[Any]:
    import tensorflow as tf

    averaged = []
    for gradient in gradients:
        with tf.control_dependencies(averaged[-1:]):  # one order on all ranks
            result = tf.numpy_function(average, [gradient], gradient.dtype)
        result.set_shape(gradient.shape)
        averaged.append(result)
    return averaged


def horovod(task: Task) -> Pass:
    """Average gradients by Horovod's allreduce."""
    import horovod.tensorflow as hvd

    hvd.init()
    return _loop(task, lambda gradients: hvd.grouped_allreduce(gradients))


def _loop(task: Task, average: Callable[[Sequence[Any]], Sequence[Any]]) -> Pass:
    """Run epochs of a loop over steps that average the gradients of a batch of each rank."""
    one_thread()
    model = _network(task.path)
    step = averaging_step(model, *_loss_and_optimizer(), average)
    return _epochs(task, _dataset(task.path, task.batch_size).repeat(), step)


def averaging_step(model: Any, loss: Any, optimizer: Any, average: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a training step that averages its gradients before it applies them."""
    import tensorflow as tf

    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply(average(gradients), model.trainable_variables)
        return value

    return step


def _epochs(task: Task, data: Any, step: Callable[..., Any]) -> Pass:
    batches = iter(data)  # which repeats: some wait for seconds until an iterator has ended

    def run() -> int:
        value: Any = 0.0
        for _ in range(task.samples):
            value = step(*next(batches))
        float(value)
        return task.samples

    return run


def mirrored(task: Task) -> Pass:
    """Average gradients by ``MultiWorkerMirroredStrategy``, in a loop of one's own: ``fit`` does not take it."""
    strategy = mirrored_strategy()
    with strategy.scope():
        model = _network(task.path)
        step = mirrored_step(strategy, model, *_loss_and_optimizer(), task.batch_size * strategy.num_replicas_in_sync)
    data = strategy.distribute_datasets_from_function(lambda context: _dataset(task.path, task.batch_size).repeat())
    return _epochs(task, data, step)


def mirrored_strategy() -> Any:
    """Return a ``MultiWorkerMirroredStrategy`` whose workers are the ranks, of one thread each. *Collective*."""
    from mpi4py import MPI

    workers = [f"localhost:{PORT + number}" for number in range(MPI.COMM_WORLD.size)]
    cluster = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": MPI.COMM_WORLD.rank}}
    os.environ["TF_CONFIG"] = json.dumps(cluster)
    import tensorflow as tf

    one_thread()
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


def mirrored_step(strategy: Any, model: Any, loss: Any, optimizer: Any, batch_size: int) -> Callable[..., Any]:
    """Return a training step of all workers; to be called in the strategy's scope.

    Parameters
    ----------
    batch_size : samples of all workers.
    """
    import tensorflow as tf

    optimizer.build(model.trainable_variables)
    loss.reduction = "sum"

    def replica(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True)) / batch_size
        gradients = tape.gradient(value, model.trainable_variables)
        context = tf.distribute.get_replica_context()
        optimizer.apply(context.all_reduce("sum", gradients), model.trainable_variables)
        return value

    @tf.function
    def step(x: Any, y: Any) -> Any:
        return strategy.reduce("sum", strategy.run(replica, (x, y)), axis=None)

    return step


def reduction_alone(task: Task) -> Pass:
    """Reduce as many bytes as the gradients have by one ``Allreduce`` in place."""
    from mpi4py import MPI

    flat = np.ones(sum(int(np.prod(v.shape)) for v in _network(task.path).trainable_variables), np.float32)

    def run() -> int:
        for _ in range(task.samples):
            MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, flat)
        return task.samples

    return run
