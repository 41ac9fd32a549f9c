"""Learn energies of clusters from ASE: mpiexec -n 2 python examples/users/atoms.py FOLDER."""

import sys

import keras

import matex_data as md

ATOMS = 5
keras.utils.set_random_seed(1)
frames = md.open_dataset(
    f"{sys.argv[1]}/clusters.extxyz",
    inputs=["positions", "positions_mask"],
    targets="energy",
    pad={"positions": ATOMS},
)
train, test = frames.split(0.8, 0.2, seed=1)
energy, ops, layers = train.statistics("energy"), keras.ops, keras.layers
position, mask = keras.Input((ATOMS, 3), name="positions"), keras.Input((ATOMS,), name="positions_mask")
between = position[:, :, None] - position[:, None]
distance = ops.sqrt(ops.sum(between**2, axis=-1, keepdims=True) + 1e-6)
pair = layers.Dense(1)(layers.Dense(32, "silu")(layers.Dense(32, "silu")(distance)))
counts = ops.cast(mask, "float32")
pairs = counts[:, :, None] * counts[:, None]
total = ops.sum(pair[..., 0] * pairs, axis=(1, 2))
model = keras.Model({"positions": position, "positions_mask": mask}, total * energy.std + energy.mean)
model.compile(keras.optimizers.Adam(0.005), "mse", metrics=["mae"])
md.training.fit(model, train, batch_size=24, epochs=25, verbose=0)
error = md.training.evaluate(model, test, batch_size=24, verbose=0, return_dict=True)["mae"]
if md.training.world().rank == 0:
    print(f"RESULT error {error:.4f} deviation {energy.std:.4f}")
