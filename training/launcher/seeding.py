"""Equal random numbers on all ranks, also for scripts that set no seed."""

from __future__ import annotations

import json
import os
import random
import secrets
from pathlib import Path
from typing import Any

import numpy as np

from matex_data.errors import FormatError
from matex_data.training.comm.channel import Channel
from matex_data.training.launcher.imports import after_import

SEED_FILE = "seed.json"


def seed_all_ranks(channel: Channel, number: int | None = None) -> None:
    """Seed the random generators of all ranks with one number. *Collective*.

    Parameters
    ----------
    number : the number, below 2**128 and equal on all ranks; None: draw it.

    Notes
    -----
    ``np.random.default_rng()`` then splits data in the same way on all ranks. Keras, TensorFlow and PyTorch are seeded
    when the script imports them. Names of Python's ``tempfile`` still differ.
    """
    entropy = channel.communicator.broadcast(secrets.randbits(128)) if number is None else number
    random.seed(entropy % 2**32)
    np.random.seed(entropy % 2**32)  # the generator that scripts use
    generators: Any = np.random.bit_generator
    if hasattr(generators, "randbits"):  # NumPy's source of entropy, an undocumented name
        generators.randbits = random.Random(entropy).getrandbits
    after_import(("keras", "tensorflow"), lambda: _seed_keras(entropy % 2**32))
    after_import(("torch",), lambda: _seed_torch(entropy % 2**63))


def _seed_keras(seed: int) -> None:
    """Seed Keras and TensorFlow; Python's and NumPy's numbers go on."""
    import keras

    python, numpy = random.getstate(), np.random.get_state()
    keras.utils.set_random_seed(seed)
    random.setstate(python)
    np.random.set_state(numpy)


def _seed_torch(seed: int) -> None:
    import torch

    torch.manual_seed(seed)


def script_seed(folder: Path, channel: Channel) -> int:
    """Return the number that seeds all random generators of the script, drawn at its first start. *Collective*.

    Parameters
    ----------
    folder : of the checkpoints; rank 0 creates it.

    Raises
    ------
    FormatError : on all ranks, if the file of the number cannot be read or written.
    """
    path = folder / SEED_FILE

    def stored() -> int:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                draft = path.with_suffix(f".{os.getpid()}")
                draft.write_text(json.dumps({"seed": secrets.randbits(128)}))
                draft.replace(path)
            return int(json.loads(path.read_text())["seed"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FormatError(
                "the checkpoints of this script cannot be used",
                file=str(path),
                expected="a folder that rank 0 can write to, and in it a number that an earlier start has drawn",
                found=f"{type(error).__name__}: {error}",
                remedy="give another folder to --checkpoint",
            ) from error

    return channel.communicator.on_root(stored)
