"""Models and steps that the proof does not cover: what trains them has to be that of one process, or be reported.

Arguments: names of cases; none: all. Each case returns numbers, which plain Python and the ranks print.
"""

import json
import random
import sys
import traceback

import keras
import numpy as np
import tensorflow as tf
from keras import ops

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def table(rows=48, seed=0):
    x = np.random.default_rng(seed).normal(size=(rows, 4)).astype("float32")
    return x, x[:, :1] * x[:, 1:2] + 0.3 * x[:, 2:3]


def dense(*layers):
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, "tanh"), *layers, keras.layers.Dense(1)])


def trained(model, x, y=None, **options):
    history = model.fit(x, y, **{"epochs": 3, "batch_size": 12, "shuffle": False, "verbose": 0, **options}).history
    return {"history": history, "weights": [w.numpy() for w in model.weights if w.dtype != "uint32"]}


def spread(values):
    """Return a number that samples of a batch determine together: the squared mean of each column."""
    return ops.sum(ops.square(ops.mean(values, 0)))


class Own(keras.Model):
    """A step of one's own around ``loss_of``."""

    def __init__(self, **options):
        super().__init__(**options)
        self.core = dense()
        self.amount = self.add_weight(shape=(), initializer="zeros", trainable=False, name="amount")

    def call(self, x):
        return self.core(x)

    def loss_of(self, x, y, predicted):
        return ops.mean(ops.square(y - predicted))

    def after(self, x, y, predicted, loss):
        """Do what follows the optimizer's step."""

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.loss_of(x, y, predicted)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.after(x, y, predicted, loss)
        return {"loss": loss}


def own(kind, *data, **options):
    model = kind()
    compiled = options.pop("compiled", {})
    model.compile(keras.optimizers.SGD(0.05), **compiled)
    return trained(model, *(data or table()), **options)


# Losses


@case
def mean_over_samples():
    """Return what a step of one's own gives whose loss is a mean over samples: it may be sharded."""
    return own(Own)


@case
def masked_mean():
    """Divide by the sum of a mask, which is complete in the first batch."""
    x, y = table()
    mask = np.ones_like(y)
    mask[12:][np.random.default_rng(1).random(36) < 0.6] = 0

    def loss(y_true, y_pred):
        weights = y_true[:, 1:]
        return ops.sum(weights * ops.square(y_true[:, :1] - y_pred)) / ops.maximum(ops.sum(weights), 1)

    model = dense()
    model.compile(keras.optimizers.SGD(0.05), loss)
    return trained(model, x, np.concatenate([y, mask], 1))


@case
def small_term():
    """Add a term of the batch that changes gradients by a thousandth."""

    def loss(y_true, y_pred):
        return ops.mean(ops.square(y_true - y_pred)) + 2e-3 * ops.var(y_pred)

    model = dense()
    model.compile(keras.optimizers.SGD(0.1), loss)
    return trained(model, *table(), epochs=8)


class Mixing(keras.layers.Layer):
    """Layer that subtracts the mean of the batch."""

    def call(self, x):
        return x - ops.mean(x, 0, keepdims=True)


@case
def zero_head():
    """Predict zeros at first, so that the first gradient of the layers below is zero."""
    head = keras.layers.Dense(1, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, "tanh"), Mixing(), head])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return trained(model, *table())


class Growing(Own):
    """A term of the batch that grows from zero with the steps."""

    def loss_of(self, x, y, predicted):
        return super().loss_of(x, y, predicted) + self.amount * spread(predicted)

    def after(self, x, y, predicted, loss):
        self.amount.assign_add(0.1)


@case
def growing_term():
    return own(Growing)


@case
def growing_in_executions():
    """Run four steps in one call: the term acts from the second one on."""
    return own(Growing, compiled={"steps_per_execution": 4})


class EveryThird(Own):
    """A term of the batch in every third step, which is never the first one of an execution."""

    def loss_of(self, x, y, predicted):
        acts = ops.cast(self.optimizer.iterations % 3 == 2, "float32")
        return super().loss_of(x, y, predicted) + acts * spread(predicted)


@case
def every_third_in_executions():
    return own(EveryThird, *table(72), compiled={"steps_per_execution": 3}, callbacks=[BatchLosses()])


class BatchLosses(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.history.history.setdefault("ends", []).append([batch, logs["loss"]])


class ByLabel(Own):
    """A term of the batch where it has large targets."""

    def loss_of(self, x, y, predicted):
        rare = ops.cast(ops.max(y) > 5, "float32")
        return super().loss_of(x, y, predicted) + rare * spread(predicted)


@case
def term_by_label():
    x, y = table()
    y[20:] += 6
    return own(ByLabel, x, y)


# Terms that something else switches on


class Switched(Own):
    def __init__(self):
        super().__init__()
        self.switch = tf.Variable(0.0, trainable=False)
        self.flag = False

    def loss_of(self, x, y, predicted):
        amount = self.amount + self.switch + (1.0 if self.flag else 0.0)
        return super().loss_of(x, y, predicted) + amount * spread(predicted)


class Switch(keras.callbacks.Callback):
    def __init__(self, do, epoch=1, step=1):
        super().__init__()
        self.do, self.at, self.now = do, (epoch, step), 0

    def on_epoch_begin(self, epoch, logs=None):
        self.now = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.now, batch) == self.at:
            self.do(self.model)


def _set(name, value=1.0):
    return lambda model: getattr(model, name).assign(value)


def _flag(model):
    model.flag = True
    model.make_train_function(force=True)


@case
def switched_by_keras_variable():
    return own(Switched, callbacks=[Switch(_set("amount"))])


@case
def switched_by_variable():
    return own(Switched, callbacks=[Switch(_set("switch"))])


@case
def switched_in_the_last_epoch():
    return own(Switched, callbacks=[Switch(_set("switch"), epoch=2, step=2)])


@case
def switched_by_attribute():
    return own(Switched, callbacks=[Switch(_flag)])


@case
def switched_between_fits():
    model = Switched()
    model.compile(keras.optimizers.SGD(0.05))
    trained(model, *table())
    model.switch.assign(1.0)
    return trained(model, *table())


@case
def switched_by_compile():
    model = Switched()
    model.compile(keras.optimizers.SGD(0.05))
    trained(model, *table())
    model.flag = True
    model.compile(keras.optimizers.SGD(0.05))
    return trained(model, *table())


class Frozen(Own):
    """A term of the batch for the layer that is not trained at first."""

    def __init__(self):
        super().__init__()
        self.mixing = keras.layers.Dense(1, use_bias=False, trainable=False)

    def loss_of(self, x, y, predicted):
        term = spread(self.mixing(predicted))
        return super().loss_of(x, y, predicted) + (term if self.mixing.trainable else 0.0)


@case
def trainable_between_fits():
    model = Frozen()
    model.compile(keras.optimizers.SGD(0.05))
    trained(model, *table())
    model.mixing.trainable = True
    model.compile(keras.optimizers.SGD(0.05))
    return trained(model, *table())


# State that the batch writes


class RunningMean(keras.layers.Layer):
    def build(self, shape):
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, 0))
        return x - self.mean


@case
def running_mean():
    model = dense(RunningMean())
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return trained(model, *table())


class Centers(Own):
    """Centers of two classes, towards which the features of a class are pulled."""

    def __init__(self):
        super().__init__()
        self.centers = self.add_weight(shape=(2, 1), initializer="zeros", trainable=False)

    def loss_of(self, x, y, predicted):
        classes = ops.cast(y[:, 0] > 0, "int32")
        return super().loss_of(x, y, predicted) + ops.mean(ops.square(predicted - ops.take(self.centers, classes, 0)))

    def after(self, x, y, predicted, loss):
        member = ops.cast(ops.concatenate([y <= 0, y > 0], 1), "float32")
        sums = ops.matmul(ops.transpose(member), predicted)
        counts = ops.sum(member, 0)[:, None]
        self.centers.assign(0.5 * self.centers + 0.5 * sums / (counts + 1))


@case
def class_centers():
    return own(Centers)


class Queue(Own):
    """A queue of the latest features, against which those of the batch are contrasted."""

    def __init__(self):
        super().__init__()
        self.queue = self.add_weight(shape=(24, 1), initializer="zeros", trainable=False)

    def loss_of(self, x, y, predicted):
        far = ops.mean(ops.exp(-ops.square(predicted - ops.transpose(self.queue))))
        return super().loss_of(x, y, predicted) + far

    def after(self, x, y, predicted, loss):
        self.queue.assign(ops.concatenate([predicted, self.queue], 0)[:24])


@case
def memory_queue():
    return own(Queue)


class Normalizing(Own):
    """A scale in a variable that is no weight of the model: the largest norm so far."""

    def __init__(self):
        super().__init__()
        self.largest = [tf.Variable(1.0, trainable=False)]

    def loss_of(self, x, y, predicted):
        return super().loss_of(x, y, predicted) / self.largest[0]

    def after(self, x, y, predicted, loss):
        self.largest[0].assign(ops.maximum(self.largest[0], ops.max(ops.abs(y))))


@case
def largest_so_far():
    return own(Normalizing)


# Python's own state


class Counting(Own):
    def __init__(self):
        super().__init__()
        self.count = 0

    def loss_of(self, x, y, predicted):
        self.count += 1
        return super().loss_of(x, y, predicted) * (1.0 if self.count < 6 else 0.1)


@case
def eager_counter():
    model = Counting()
    model.compile(keras.optimizers.SGD(0.05), run_eagerly=True)
    return {**trained(model, *table()), "count": model.count}


class Once(keras.layers.Layer):
    """Layer that takes its scale from the first batch."""

    def __init__(self):
        super().__init__()
        self.scale = self.add_weight(shape=(4,), initializer="ones", trainable=False)
        self.started = False

    def build(self, shape):
        """Keep Keras from calling the layer to build it."""

    def call(self, x):
        if not self.started:
            self.scale.assign(ops.std(x, 0) + 3.0)
            self.started = True
        return x / self.scale


class WithOnce(keras.Model):
    def __init__(self):
        super().__init__()
        self.once, self.core = Once(), dense()

    def build(self, shape):
        """Keep Keras from calling the model to build it."""

    def call(self, x):
        return self.core(self.once(x))


def _once(**compiled):
    model = WithOnce()
    model.compile(keras.optimizers.SGD(0.05), "mse", **compiled)
    return trained(model, *table())


@case
def initialised_once():
    return _once()


@case
def initialised_once_eagerly():
    return _once(run_eagerly=True)


# Steps


class Deciding(Own):
    """A step that is applied only where the loss is large."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = ops.mean(ops.square(y - predicted))
        gradients = tape.gradient(loss, self.trainable_variables)

        def apply():
            self.optimizer.apply(gradients, self.trainable_variables)
            return True

        tf.cond(loss > 1.3, apply, lambda: False)
        return {"loss": loss}


@case
def applied_if_loss_is_large():
    return own(Deciding)


class DecidingByValue(Own):
    """Gradients that are zero where the loss is small."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(y - self(x, training=True)))
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients = [tf.where(loss > 1.3, g, tf.zeros_like(g)) for g in gradients]
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@case
def zeroed_if_loss_is_small():
    return own(DecidingByValue)


class OldGradients(Own):
    """``tf.gradients`` in a step, of a loss that combines samples."""

    def train_step(self, data):
        x, y = data
        predicted = self(x, training=True)
        loss = self.loss_of(x, y, predicted) + spread(predicted)
        self.optimizer.apply(tf.gradients(loss, list(self.trainable_variables)), self.trainable_variables)
        return {"loss": loss}


@case
def tf_gradients():
    return own(OldGradients)


class Nested(Own):
    """A step whose optimizer works in a function of its own."""

    @tf.function
    def update(self, gradients):
        self.optimizer.apply(gradients, self.trainable_variables)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y, self(x, training=True))
        self.update(tape.gradient(loss, self.trainable_variables))
        return {"loss": loss}


@case
def nested_function():
    return own(Nested)


class NestedMixing(Nested):
    def loss_of(self, x, y, predicted):
        return super().loss_of(x, y, predicted) + spread(predicted)


@case
def nested_function_mixing():
    return own(NestedMixing)


class Contrast(Own):
    """A loss of pairs of samples."""

    def loss_of(self, x, y, predicted):
        return super().loss_of(x, y, predicted) + ops.mean(ops.square(predicted - ops.roll(predicted, 1, 0)))


@case
def fewer_rows_than_ranks():
    return own(Contrast, batch_size=1, epochs=1)


@case
def two_rows():
    return own(Contrast, batch_size=2, epochs=1)


# Data


class Shuffling(keras.utils.PyDataset):
    """As a shuffling loader of another library: each process draws an order of its own."""

    def __init__(self):
        super().__init__()
        self.x, self.y = table()

    def __len__(self):
        return 4

    def __getitem__(self, index):
        rows = random.SystemRandom().sample(range(48), 12)
        return self.x[rows], self.y[rows]


@case
def another_order_on_each_rank():
    model = dense()
    model.compile(keras.optimizers.SGD(0.05), "mse")
    trained(model, Shuffling(), batch_size=None)
    return {"weights": []}


@case
def another_order_and_mixing():
    own(Contrast, Shuffling(), batch_size=None)
    return {"weights": []}


def graphs():
    """Yield graphs of several sizes as one: features of nodes, their graph, and a target for each graph."""
    rng = np.random.default_rng(3)
    while True:
        sizes = rng.integers(1, 4, 6)
        nodes = rng.normal(size=(sizes.sum(), 4)).astype("float32")
        yield (nodes, np.repeat(np.arange(6), sizes).astype("int32")), rng.normal(size=(6, 1)).astype("float32")


class OfGraphs(keras.Model):
    def __init__(self):
        super().__init__()
        self.core = dense()

    def call(self, inputs):
        nodes, graph = inputs
        return tf.math.segment_sum(self.core(nodes), graph)


@case
def graphs_of_several_sizes():
    spec = (
        (tf.TensorSpec((None, 4), tf.float32), tf.TensorSpec((None,), tf.int32)),
        tf.TensorSpec((None, 1), tf.float32),
    )
    data = tf.data.Dataset.from_generator(graphs, output_signature=spec)
    model = OfGraphs()
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return trained(model, data, batch_size=None, steps_per_epoch=4)


class WithTable(keras.Model):
    def __init__(self):
        super().__init__()
        self.core = dense()

    def call(self, inputs):
        x, constant = inputs
        return self.core(x) + ops.mean(constant)


@case
def table_in_train_on_batch():
    x, y = table(12)
    model = WithTable()
    model.compile(keras.optimizers.SGD(0.05), "mse")
    losses = [model.train_on_batch([x, np.arange(5, dtype="float32")], y) for _ in range(4)]
    return {"losses": losses, "weights": model.get_weights()}


@case
def growing_in_train_on_batch():
    x, y = table(12)
    model = Growing()
    model.compile(keras.optimizers.SGD(0.05))
    losses = [model.train_on_batch(x, y, return_dict=True)["loss"] for _ in range(12)]
    return {"losses": losses, "weights": model.get_weights()}


# Data that the script shards itself


def own_shards(model):
    import matex_data as md  # plain Python has no use for it

    x, y = table(48)
    return trained(model, md.training.shard(tf.data.Dataset.from_tensor_slices((x, y)).batch(12)), batch_size=None)


@case
def proven_on_own_shards():
    model = dense(keras.layers.Dense(5))  # not of the kind of another case, whose message would do for both
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return own_shards(model)


@case
def mixing_on_own_shards():
    model = dense(Mixing())
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return own_shards(model)


# What a step returns


class Logs(Own):
    def train_step(self, data):
        return {**super().train_step(data), **self.numbers(*data)}

    def test_step(self, data):
        x, y = data
        return {"error": ops.mean(ops.abs(y - self(x))), **self.numbers(x, y)}

    def numbers(self, x, y):
        return {
            "sum": ops.sum(y),
            "count": ops.sum(ops.cast(y > 0, "int32")),
            "largest": ops.max(y),
            "smallest": ops.min(y),
            "mean": ops.mean(y),
            "rows": ops.shape(y)[0],
            "float_rows": ops.sum(ops.ones_like(y)) / 2,
            "penalty": ops.sum(ops.square(self.core.layers[0].kernel)),
        }


@case
def sums_and_counts():
    model = Logs()
    model.compile(keras.optimizers.SGD(0.05))
    x, y = table(47)
    found = trained(model, x, y, validation_data=(x[:22], y[:22]))
    return {**found, "evaluated": model.evaluate(x, y, batch_size=9, verbose=0, return_dict=True)}


class TestBatches(keras.callbacks.Callback):
    """Logs of the batches of evaluations."""

    __test__ = False

    def __init__(self):
        super().__init__()
        self.found = []

    def on_test_batch_end(self, batch, logs=None):
        self.found.append(dict(logs))


@case
def logs_of_evaluated_batches():
    model = dense(keras.layers.Dense(7))
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    x, y = table(47)
    reader = TestBatches()
    found = trained(model, x, y, validation_data=(x[:22], y[:22]), callbacks=[reader])
    return {**found, "evaluated": model.evaluate(x, y, 9, verbose=0, callbacks=[reader]), "batches": reader.found}


class LogsThatMix(Logs):
    def numbers(self, x, y):
        return {"of_positive": ops.sum(y * ops.cast(y > 0, "float32")) / ops.sum(ops.cast(y > 0, "float32"))}


@case
def test_step_that_mixes():
    """Each number of the training steps is that of the batch, or is reported; evaluation is whole."""
    model = LogsThatMix()
    model.compile(keras.optimizers.SGD(0.05))
    x, y = table(47)
    found = trained(model, x, y, validation_data=(x[:22], y[:22]))
    found["history"].pop("of_positive")
    again = model.evaluate(x, y, batch_size=9, verbose=0, return_dict=True)
    return {**found, "evaluated": again, "few": model.evaluate(x[:5], y[:5], verbose=0, return_dict=True)}


class Tracked(Own):
    """Metrics get pairs of samples in ``test_step`` alone."""

    def __init__(self):
        super().__init__()
        self.pairs = keras.metrics.Mean("pairs")

    def test_step(self, data):
        x, y = data
        self.pairs.update_state(spread(self(x) - y))
        return {"pairs": self.pairs.result()}


@case
def metric_of_pairs():
    model = Tracked()
    model.compile(keras.optimizers.SGD(0.05))
    x, y = table(48)
    found = trained(model, x, y, validation_data=(x[:22], y[:22]))
    return {**found, "evaluated": model.evaluate(x, y, batch_size=12, verbose=0)}


class Evaluating(keras.callbacks.Callback):
    def __init__(self, x, y):
        super().__init__()
        self.x, self.y, self.found = x, y, []

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self.found.append(self.model.evaluate(self.x, self.y, verbose=0, batch_size=7))

    def on_epoch_end(self, epoch, logs=None):
        self.found.append(self.model.evaluate(self.x, self.y, verbose=0))


@case
def evaluate_in_a_callback():
    model = dense()
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    x, y = table()
    evaluating = Evaluating(x[:20], y[:20])
    found = trained(model, x, y, callbacks=[evaluating])
    return {**found, "evaluated": evaluating.found}


# Predictions


@case
def predictions_of_names():
    """Order names as a set does, which is another order in each process unless their hashes are equal."""
    names = list({f"sample {i}" for i in range(24)})
    x = np.array([[float(name.split()[1])] * 4 for name in names], np.float32) / 24
    predicted = dense().predict(x, verbose=0, batch_size=8)[:, 0]
    return {"predicted": [predicted[i] for i in np.argsort(names)]}


@case
def predictions_that_mix():
    model = dense(Mixing())
    x, y = table(24)
    model.compile("sgd", "mse")
    return {"predicted": model.predict(x, verbose=0, batch_size=8), "evaluated": model.evaluate(x, y, verbose=0)}


def plain(value):
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if isinstance(value, str) else np.asarray(value, np.float64).tolist()


for name in sys.argv[1:] or CASES:
    sys.stderr.write(f"BEGIN {name}\n")
    sys.stderr.flush()
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    try:
        found = plain(CASES[name]())
    except Exception as error:
        traceback.print_exc()
        found = repr(error)
    print("CASE", json.dumps([name, found]), flush=True)
