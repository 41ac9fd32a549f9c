"""Results of Keras's training, validation, evaluation and prediction, case by case.

Arguments: names of cases; none: all.
"""

import json
import sys
import traceback

import keras
import numpy as np
import tensorflow as tf

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def table(rows, seed=0):
    x = np.random.default_rng(seed).normal(size=(rows, 4)).astype("float32")
    return x, x[:, :1] * x[:, 1:2] + 0.3 * x[:, 2:3]


def classes(rows, seed=0):
    x, y = table(rows, seed)
    return x, (np.abs(y[:, 0]) * 3).astype("int64") % 3


def words(rows):
    rng = np.random.default_rng(4)
    lengths = rng.integers(1, 6, rows)
    x = np.where(np.arange(5) < lengths[:, None], rng.integers(1, 20, (rows, 5)), 0).astype("int32")
    return x, (x % 3).astype("int64")


def dense(units=1, activation=None):
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, "tanh"), keras.layers.Dense(units, activation)])


def two_outputs():
    x = keras.Input((4,))
    hidden = keras.layers.Dense(6, "tanh")(x)
    outputs = [keras.layers.Dense(1, name="a")(hidden), keras.layers.Dense(3, name="b")(hidden)]
    return keras.Model(x, outputs)


def sequences():
    x = keras.Input((5,), dtype="int32")
    hidden = keras.layers.Embedding(20, 4, mask_zero=True)(x)
    return keras.Model(x, [keras.layers.Dense(3, name="a")(hidden), keras.layers.Dense(3, name="b")(hidden)])


def cross_entropy(**options):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def fitted(model, *args, **options):
    return model.fit(*args, **{"epochs": 2, "batch_size": 12, "shuffle": False, "verbose": 0, **options}).history


def batches(*arrays, sizes):
    """Yield batches of these sizes without end."""
    ends = np.cumsum(sizes)
    while True:
        for size, end in zip(sizes, ends, strict=True):
            parts = tuple(array[end - size : end] for array in arrays)
            yield parts


def pipeline(*arrays, sizes):
    """Return a ``tf.data`` pipeline of batches of these sizes."""
    spec = tuple(tf.TensorSpec((None, *array.shape[1:]), array.dtype) for array in arrays)

    def once():
        stream = batches(*arrays, sizes=sizes)
        for _ in sizes:
            yield next(stream)

    return tf.data.Dataset.from_generator(once, output_signature=spec)


# Losses of several outputs


def _outputs(losses, rows=43, weights=None, **compiled):
    model = two_outputs()
    model.compile(keras.optimizers.SGD(0.01), losses, **compiled)
    (x, a), (_, b) = table(rows), classes(rows)
    (u, c), (_, d) = table(22, 5), classes(22, 5)
    given = {"validation_data": (u, [c, d])}
    if weights is not None:
        given = {"sample_weight": weights[:rows], "validation_data": (u, [c, d], weights[:22])}
    history = fitted(model, x, [a, b], **given)
    return {**history, "evaluated": model.evaluate(u, [c, d], batch_size=9, verbose=0, return_dict=True)}


@case
def outputs():
    return _outputs(["mse", cross_entropy()], loss_weights=[0.3, 2.0])


@case
def outputs_sum():
    losses = [keras.losses.MeanSquaredError(reduction="sum"), cross_entropy()]
    return _outputs(losses, loss_weights=[0.1, 1.0], metrics=[["mae"], ["accuracy"]])


@case
def outputs_weighted():
    weights = np.linspace(0, 2, 43).astype("float32") ** 2
    losses = ["mse", cross_entropy(reduction="mean_with_sample_weight")]
    return _outputs(losses, weights=weights, weighted_metrics=[["mae"], ["accuracy"]])


@case
def outputs_eagerly():
    return _outputs(["mse", cross_entropy()], run_eagerly=True)


@case
def outputs_few_rows():
    return _outputs(["mse", cross_entropy()], rows=37)


@case
def outputs_masked():
    model = sequences()
    model.compile(keras.optimizers.SGD(0.01), [cross_entropy(), cross_entropy(reduction="sum")], loss_weights=[1, 0.01])
    x, y = words(43)
    history = fitted(model, x, [y, y], validation_data=(x[:22], [y[:22], y[:22]]))
    return {**history, "evaluated": model.evaluate(x, [y, y], batch_size=9, verbose=0, return_dict=True)}


@case
def sum_alone():
    model = dense()
    model.compile(keras.optimizers.SGD(0.001), keras.losses.MeanSquaredError(reduction="sum"), metrics=["mae"])
    x, y = table(43)
    return fitted(model, x, y, validation_data=(x[:22], y[:22]))


# What train_step returns


class Guide(keras.Model):
    """As in Keras's guide on a ``train_step`` of one's own, with two trackers."""

    extra = False

    def __init__(self, **options):
        super().__init__(**options)
        self.core = dense()
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae_metric = keras.metrics.MeanAbsoluteError(name="mae")

    def call(self, x):
        return self.core(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = keras.ops.mean(keras.losses.mean_squared_error(y, predicted))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.loss_tracker.update_state(loss)
        self.mae_metric.update_state(y, predicted)
        return self.logs(x)

    def test_step(self, data):
        x, y = data
        predicted = self(x, training=False)
        self.loss_tracker.update_state(keras.ops.mean(keras.losses.mean_squared_error(y, predicted)))
        self.mae_metric.update_state(y, predicted)
        return self.logs(x)

    def logs(self, x):
        return {"loss": self.loss_tracker.result(), "mae": self.mae_metric.result()}

    @property
    def metrics(self):
        return [self.loss_tracker, self.mae_metric]


class Beside(Guide):
    """A value beside the metrics, one of which has another name."""

    def logs(self, x):
        own = {"spread": keras.ops.mean(x[:, 0]), "rows": {"deep": keras.ops.mean(x[:, 1])}}
        return {"total": self.loss_tracker.result(), "mae": self.mae_metric.result(), **own}


def _guide(kind, rows, **compiled):
    model = kind()
    model.compile(keras.optimizers.Adam(0.01), **compiled)
    x, y = table(rows)
    history = fitted(model, x, y, validation_data=(x[:22], y[:22]))
    return {**history, "evaluated": model.evaluate(x, y, batch_size=10, verbose=0, return_dict=True)}


@case
def guide():
    return _guide(Guide, 43)


@case
def guide_few_rows():
    return _guide(Guide, 37)


@case
def beside():
    return _guide(Beside, 43)


@case
def beside_few_rows():
    return _guide(Beside, 37)


class Nested(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=predicted)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return self.logs(y, predicted, loss)

    def test_step(self, data):
        x, y = data
        predicted = self(x, training=False)
        return self.logs(y, predicted, self.compute_loss(y=y, y_pred=predicted))

    def logs(self, y, predicted, loss):
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, predicted)
        return {metric.name: metric.result() for metric in self.metrics}


@case
def nested():
    model = Nested([keras.Input((4,)), keras.layers.Dense(6, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae", keras.metrics.RootMeanSquaredError(name="r")])
    x, y = table(37)
    history = fitted(model, x, y, validation_data=(x[:22], y[:22]))
    return {**history, "evaluated": model.evaluate(x, y, batch_size=10, verbose=0, return_dict=True)}


# Metrics


class Largest(keras.metrics.Metric):
    """The largest error that was seen: its states over ranks have no sum."""

    def __init__(self, name="largest", **options):
        super().__init__(name=name, **options)
        self.most = self.add_variable((), "zeros", name="most")

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = keras.ops.max(keras.ops.abs(keras.ops.cast(y_true, "float32") - y_pred))
        self.most.assign(keras.ops.maximum(self.most, error))

    def result(self):
        return self.most


class ByBatch(keras.metrics.Metric):
    """The mean over batches of what is no mean over samples."""

    def __init__(self, name="by_batch", **options):
        super().__init__(name=name, **options)
        self.total = self.add_variable((), "zeros", name="total")
        self.steps = self.add_variable((), "zeros", name="steps")

    def update_state(self, y_true, y_pred, sample_weight=None):
        y_true = keras.ops.cast(y_true, "float32")
        self.total.assign_add(keras.ops.sqrt(keras.ops.mean(keras.ops.square(y_true - y_pred))))
        self.steps.assign_add(1)

    def result(self):
        return keras.ops.divide_no_nan(self.total, self.steps)


class Positives(keras.metrics.Metric):
    """As in Keras's guide: a count."""

    def __init__(self, name="positives", **options):
        super().__init__(name=name, **options)
        self.count = self.add_weight(shape=(), initializer="zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(keras.ops.sum(keras.ops.cast(y_pred > 0, "float32")))

    def result(self):
        return self.count


@case
def aggregations():
    model = dense(1, "sigmoid")
    metrics = [
        keras.metrics.AUC(name="auc"),
        keras.metrics.Precision([0.2, 0.5, 0.7], name="precision"),
        keras.metrics.RecallAtPrecision(0.5, name="recall_at"),
        keras.metrics.F1Score(threshold=0.5, name="f1"),
        keras.metrics.R2Score(name="r2"),
        keras.metrics.BinaryIoU(name="iou"),
        keras.metrics.TruePositives(name="tp"),
        Positives(),
    ]
    model.compile(keras.optimizers.Adam(0.02), "binary_crossentropy", metrics=metrics, weighted_metrics=["mae"])
    x, y = table(43)
    y, weights = (y > 0).astype("float32"), np.linspace(0, 2, 43).astype("float32")
    history = fitted(model, x, y, sample_weight=weights, validation_data=(x[:22], y[:22], weights[:22]))
    return {**history, "evaluated": model.evaluate(x, y, batch_size=9, verbose=0)}


@case
def many_classes():
    model = dense(3, "softmax")
    metrics = [keras.metrics.OneHotMeanIoU(3, name="iou"), keras.metrics.F1Score(average="macro", name="f1")]
    metrics.append(keras.metrics.F1Score(name="by_class"))
    model.compile(keras.optimizers.Adam(0.02), "categorical_crossentropy", metrics=metrics)
    x, y = classes(37)
    y = np.eye(3, dtype="float32")[y]
    return fitted(model, x, y, validation_data=(x[:22], y[:22]))


def _root(y_true, y_pred):
    return keras.ops.sqrt(keras.ops.mean(keras.ops.square(keras.ops.cast(y_true, "float32") - y_pred)))


@case
def own_metrics():
    model = dense()
    model.compile(keras.optimizers.Adam(0.02), "mse", metrics=[Largest(), ByBatch(), _root, "mae"])
    x, y = table(37)
    history = fitted(model, x, y, validation_data=(x[:22], y[:22]))
    return {**history, "evaluated": model.evaluate(x, y, batch_size=9, verbose=0, return_dict=True)}


@case
def own_metrics_equal_batches():
    model = dense()
    model.compile(keras.optimizers.Adam(0.02), "mse", metrics=[Largest(), ByBatch(), _root, "mae"])
    data = tf.data.Dataset.from_tensor_slices(table(36)).batch(12, drop_remainder=True)
    return fitted(model, data, batch_size=None, validation_data=data)


# Sample weights, class weights, splits


@case
def weights_and_split():
    model = dense(3)
    model.compile(keras.optimizers.Adam(0.02), cross_entropy(), metrics=["accuracy"], weighted_metrics=["accuracy"])
    x, y = classes(60)
    first = fitted(model, x, y, class_weight={0: 0.5, 1: 2.0, 2: 1.0}, validation_split=0.3)
    return {"classes": first, "samples": fitted(model, x, y, sample_weight=np.linspace(0, 2, 60), validation_split=0.1)}


# Batches one by one


@case
def on_batch():
    model = two_outputs()
    model.compile(keras.optimizers.Adam(0.02), ["mse", cross_entropy()], metrics=[["mae"], ["accuracy"]])
    (x, a), (_, b) = table(40), classes(40)
    found, start = [], 0
    for size in (12, 12, 7, 1, 5, 2, 1):
        rows = slice(start, start := start + size)
        found.append(model.train_on_batch(x[rows], [a[rows], b[rows]]))
    found.append(model.train_on_batch(x, [a, b], sample_weight=np.linspace(0, 1, 40), return_dict=True))
    model.reset_metrics()
    found.append(model.test_on_batch(x[:7], [a[:7], b[:7]]))
    found.append(model.test_on_batch(x[:1], [a[:1], b[:1]], return_dict=True))
    predicted = model.predict_on_batch(x[:7])
    found.append(model.train_on_batch(x, [a, b], return_dict=True))
    return {"logs": found, "predicted": predicted}


@case
def on_single_batches():
    model = dense(3)
    model.compile(keras.optimizers.Adam(0.02), cross_entropy(reduction="sum"), metrics=["accuracy"])
    x, y = classes(9)
    found = [model.train_on_batch(x[:1], y[:1])]
    found += [model.train_on_batch(x, y, class_weight={0: 0.5, 1: 2.0, 2: 1.0}), model.test_on_batch(x, y)]
    return {"logs": found}


@case
def accumulated_on_batch():
    """What a script may save within an accumulation."""
    model = dense(3)
    model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=3), cross_entropy())
    x, y = classes(24)
    found = [model.train_on_batch(x, y) for _ in range(4)]
    return {"logs": found, "state": [v.numpy() for v in model.optimizer.variables]}


@case
def evaluated_within_epochs():
    model = dense(3)
    model.compile(keras.optimizers.Adam(0.02), cross_entropy(), metrics=["accuracy"])
    x, y = classes(40)
    found = []

    def few(batch, logs):
        if batch == 1:
            found.append(model.evaluate(x[:5], y[:5], verbose=0))

    def one(batch, logs):
        if batch == 1:
            model.test_on_batch(x[:9], y[:9])

    hooks = [keras.callbacks.LambdaCallback(on_train_batch_end=hook) for hook in (few, one)]
    return {
        "few": fitted(model, x, y, callbacks=hooks[:1]),
        "one": fitted(model, x, y, callbacks=hooks[1:]),
        "is": found,
    }


# Predictions


@case
def predictions():
    model = two_outputs()
    x, _ = table(60)
    named = keras.Model(model.input, {"a": model.outputs[0], "b": model.outputs[1]})
    images = np.random.default_rng(5).normal(size=(3, 6, 6, 1)).astype("float32")
    fused = [keras.layers.Conv2D(3, 3, activation="relu"), keras.layers.Conv2D(2, 1), keras.layers.Flatten()]
    convolutions = keras.Sequential([keras.Input((6, 6, 1)), *fused])
    sizes = (12, 1, 7, 2, 1, 11)
    prefetched = pipeline(x, sizes=sizes).prefetch(4)
    return {
        "arrays": model.predict(x[:43], batch_size=10, verbose=0),
        "one_row": model.predict(x[:1], verbose=0),
        "one_image": convolutions.predict(images, batch_size=1, verbose=0),
        "prefetch": named.predict(prefetched, verbose=0),
        "prefetch_steps": named.predict(prefetched.repeat().prefetch(3), steps=8, verbose=0),
        "generator": model.predict(batches(x, sizes=sizes), steps=3, verbose=0),
        "generator_again": model.predict(batches(x, sizes=(2, 1, 1)), steps=5, verbose=0),
        "on_batch": model.predict_on_batch(x[:7]),
        "slices": model.predict(tf.data.Dataset.from_tensor_slices(x).batch(8).prefetch(tf.data.AUTOTUNE), verbose=0),
    }


@case
def predictions_several_steps():
    model = dense()
    model.compile("sgd", "mse", steps_per_execution=3)
    x, _ = table(60)
    return {
        "generator": model.predict(batches(x, sizes=(5, 7, 1, 2)), steps=6, verbose=0),
        "arrays": model.predict(x, batch_size=8, verbose=0),
    }


class Stop(keras.callbacks.Callback):
    def on_predict_batch_end(self, batch, logs=None):
        self.model.stop_predicting = batch == 1


@case
def predictions_stopped():
    x, _ = table(60)
    return {"stopped": dense().predict(x, batch_size=7, callbacks=[Stop()], verbose=0)}


@case
def predictions_ragged():
    """Batches whose outputs have other lengths: Keras gives a ragged tensor."""
    model = keras.Sequential([keras.Input((None, 2)), keras.layers.Dense(3)])
    rng = np.random.default_rng(1)
    found = [rng.normal(size=(rows, length, 2)).astype("float32") for rows, length in ((5, 3), (1, 4), (4, 2))]
    spec = tf.TensorSpec((None, None, 2), tf.float32)
    ragged = model.predict(tf.data.Dataset.from_generator(lambda: iter(found), output_signature=spec), verbose=0)
    return {"kind": type(ragged).__name__, "rows": [row.numpy() for row in ragged]}


def plain(value):
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if isinstance(value, str) else np.asarray(value, np.float64).tolist()


for name in sys.argv[1:] or CASES:
    keras.utils.set_random_seed(3)
    try:
        found = plain(CASES[name]())
    except Exception as error:
        traceback.print_exc()
        found = repr(error)
    print("CASE", json.dumps([name, found]), flush=True)
