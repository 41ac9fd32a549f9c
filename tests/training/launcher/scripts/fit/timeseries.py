"""Windows of a series, as Keras's example of a weather forecast makes them."""

import sys

import keras
import numpy as np

keras.utils.set_random_seed(24)
series = np.sin(np.arange(150) / 7).astype("float32")[:, None] + np.random.normal(0, 0.1, (150, 2)).astype("float32")
train = keras.utils.timeseries_dataset_from_array(series[:-8], series[8:, :1], sequence_length=8, batch_size=30)
valid = keras.utils.timeseries_dataset_from_array(
    series[100:-8], series[108:, :1], sequence_length=8, sampling_rate=1, sequence_stride=2, batch_size=16
)
inputs = keras.Input((8, 2))
model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.SimpleRNN(5)(inputs)))
model.compile(optimizer=keras.optimizers.Adam(learning_rate=0.01), loss="mse")
history = model.fit(train, epochs=2, validation_data=valid, verbose=0)
for name in ("loss", "val_loss"):
    print("RESULT", name, *[f"{v:.6f}" for v in history.history[name]])
model.save_weights(sys.argv[1])
