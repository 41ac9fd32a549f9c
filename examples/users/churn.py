"""Predict which customers leave, from a CSV table: mpiexec -n 2 python examples/users/churn.py FOLDER."""

import sys

import keras

import matex_data as md

folder, inputs = sys.argv[1], ["contract", "tenure", "charges"]
keras.utils.set_random_seed(1)
table = md.open_dataset(
    f"{folder}/customers.csv",
    inputs=inputs,
    targets="churn",
    dtype={"churn": "category"},  # No: 0, Yes: 1
    one_hot=["contract"],
    missing={"charges": "median"},
)
train, test = table.split(0.8, 0.2, seed=1, stratify="churn")
contract = keras.Input(train.schema["contract"].shape, name="contract")
tenure, charges = keras.Input((), name="tenure"), keras.Input((), name="charges")
numbers = [train.normalization(name)(x[:, None]) for name, x in (("tenure", tenure), ("charges", charges))]
hidden = keras.layers.Dense(16, "silu")(keras.layers.Concatenate()([contract, *numbers]))
outputs = keras.layers.Dense(1, "sigmoid")(hidden)
model = keras.Model({"contract": contract, "tenure": tenure, "charges": charges}, outputs)
model.compile(keras.optimizers.Adam(0.01), "bce", weighted_metrics=[keras.metrics.AUC(name="auc")])
md.training.fit(model, train, batch_size=50, epochs=8, verbose=0, class_weight=train.class_weights("churn"))
found = md.training.evaluate(model, test, batch_size=50, verbose=0, return_dict=True)
md.training.predict(model, test, to=f"{folder}/scores.csv", fields=["customer"])
if md.training.world().rank == 0:
    print(f"RESULT auc {found['auc']:.3f} loss {found['loss']:.3f}")
