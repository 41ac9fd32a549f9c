"""Keras's example of SimCLR in short: each row of the batch is compared with all others."""

import sys

import keras
import numpy as np
from keras import ops


class Contrastive(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential(
            [keras.Input((5,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(3)]
        )

    def call(self, pairs):
        return [ops.normalize(self.encoder(pairs[:, i]), axis=1) for i in range(2)]

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        similarities = ops.matmul(y_pred[0], ops.transpose(y_pred[1])) / 0.2
        labels = ops.arange(ops.shape(similarities)[0])
        return ops.mean(keras.losses.sparse_categorical_crossentropy(labels, similarities, from_logits=True))


keras.utils.set_random_seed(4)
images = np.random.normal(size=(60, 1, 5))
pairs = (images + 0.1 * np.random.normal(size=(60, 2, 5))).astype("float32")
model = Contrastive()
model.compile(keras.optimizers.Adam(0.02))
model.fit(pairs, batch_size=12, epochs=2, verbose=0)
print("RESULT kernel", *[f"{v:.6f}" for v in model.encoder.layers[1].kernel.numpy().ravel()[:6]])
model.save_weights(sys.argv[1])
