"""Tell events of a new particle from background, whose files count by their cross sections, and draw the score.

python sample_data/make.py collisions
mpiexec -n 2 python examples/signal_search.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import matplotlib.pyplot as plt
import numpy as np

import matex_data as md

FOLDER = Path(__file__).resolve().parent.parent / "sample_data" / "collisions"
OPTIONS: dict[str, Any] = {
    "file_fields": {
        "label": {"signal*": 1, "background_*": 0},
        "xsec": {"signal*": 0.9, "background_soft*": 30.0, "background_hard*": 8.0},  # pb
        "generated": {"signal*": 900, "background_soft*": 1400, "background_hard*": 1000},  # sums of genWeight
    },
    "derive": {"ht": "sum(Jet_pt)", "jets": "count(Jet_pt > 30)", "log_met": "log(MET_pt + 1)"},
    "where": "count(Jet_pt > 30) >= 2",
    "weights": "genWeight * xsec / generated",  # the cross section in pb that an event stands for
}


def train(folder: str, epochs: int = 12, batch_size: int = 96, picture: str | None = None) -> dict[str, Any]:
    """Train, and return the logs with weights of the network and figures of the test events. *Collective*."""
    keras.utils.set_random_seed(1)
    names = ["ht", "jets", "log_met"]
    data = md.open_dataset(f"{folder}/*.root", inputs=names, stack=True, targets="label", **OPTIONS)
    training, held_out, test = data.split(0.6, 0.2, 0.2, seed=1, stratify="label")
    layers = [keras.layers.Dense(32, "silu"), keras.layers.Dense(16, "silu"), keras.layers.Dense(1, "sigmoid")]
    model = keras.Sequential([keras.Input((3,)), training.normalization("inputs", axis=-1), *layers])
    model.compile(keras.optimizers.Adam(0.005), "bce", weighted_metrics=[keras.metrics.AUC(name="auc")])
    sets = training.tf_dataset(batch_size, shuffle=True, seed=1), held_out.tf_dataset(batch_size, remainder="keep")
    history = md.training.fit(model, sets[0], validation_data=sets[1], epochs=epochs, verbose=2)
    found = md.training.evaluate(model, test, batch_size=batch_size, return_dict=True, verbose=0)
    score = md.training.predict(model, test, gather=True)[:, 0]
    label, weight = (md.training.allgather(test.load()[name]) for name in ("label", "sample_weight"))
    if picture and md.training.world().rank == 0:
        kinds = [label == 0, label == 1]
        plt.hist([score[k] for k in kinds], 20, weights=[weight[k] for k in kinds], stacked=True)
        plt.gca().set(xlabel="score", ylabel="cross section in pb", yscale="log")
        plt.legend(["background", "signal"])
        plt.savefig(picture)
    weights = np.concatenate([np.ravel(weight) for weight in model.get_weights()])
    events = {"label": label, "weight": weight, "score": score}
    return {**history.history, **events, "weights": weights, "auc": found["auc"]}


if __name__ == "__main__":
    result = train(str(FOLDER), picture="signal_search.png")
    if md.training.world().rank == 0:
        print(f"area under the curve of test events {result['auc']:.3f}, see signal_search.png")
