"""Tell signal from background in NanoAOD: mpiexec -n 2 python examples/users/nanoaod.py FOLDER."""

import sys

import keras

import matex_data as md

folder = sys.argv[1]
keras.utils.set_random_seed(1)
events = md.open_dataset(
    f"{folder}/*.root",
    inputs=["ht", "jets", "met"],
    targets="is_signal",
    stack=True,
    file_fields={"is_signal": {"signal*": 1, "background*": 0}},
    derive={"ht": "sum(Jet_pt[Jet_pt > 30])", "jets": "count(Jet_pt > 30)", "met": "log(MET_pt + 1)"},
    where="count(Jet_pt > 30) >= 1",
    weights="genWeight",
)
train, test = events.split(0.7, 0.3, seed=1, stratify="is_signal")
dense = [keras.layers.Dense(16, "silu"), keras.layers.Dense(1, "sigmoid")]
model = keras.Sequential([keras.Input((3,)), train.normalization("inputs", axis=-1), *dense])
model.compile(keras.optimizers.Adam(0.01), "bce", weighted_metrics=["accuracy"])
md.training.fit(model, train, batch_size=64, epochs=5, verbose=0)
loss, accuracy = md.training.evaluate(model, test, batch_size=64, verbose=0)
md.training.predict(model, test, to=f"{folder}/scores.parquet", fields=["event", "genWeight"])
if md.training.world().rank == 0:
    print(f"RESULT accuracy {accuracy:.3f} loss {loss:.3f}")
