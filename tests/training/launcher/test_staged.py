"""``matex run --stages``: an unchanged script trains in stages, and prints what it prints in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launch import run_script

SCRIPT = Path(__file__).parent / "scripts" / "stages.py"
LAUNCHER = "from matex_data.training.launcher.run import main; main()"


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "options"),
    [
        (2, "auto", ()),
        pytest.param(2, "2", (), marks=pytest.mark.slow),
        pytest.param(4, "2", ("--shard-optimizer",), marks=pytest.mark.slow),
        pytest.param(4, "auto", ("--model", "2", "--shard-optimizer"), marks=pytest.mark.slow),
    ],
)
def test_a_script_prints_what_it_prints_in_one_process(
    ranks: int, micro_batches: str, options: tuple[str, ...]
) -> None:
    plain = run_script(0, SCRIPT, timeout=120)
    given = ("--stages", "2", "--micro-batches", micro_batches, *options)
    staged = run_script(ranks, LAUNCHER, *given, str(SCRIPT), timeout=180)
    assert plain.returncode == staged.returncode == 0, plain.stderr + staged.stderr
    assert staged.stdout == plain.stdout
    assert plain.stdout.count("\n") == 4


def test_the_stages_of_a_replica_get_the_rows_of_a_sharded_dataset_in_one_order() -> None:
    import tensorflow as tf

    from matex_data.mpi.library import MPI
    from matex_data.training.comm.channel import open_channel
    from matex_data.training.launcher.keras_patches import PatchedCall

    options = tf.data.Options()
    options.deterministic = False
    rows = tf.data.Dataset.range(4).batch(2).with_options(options)
    rows.matex_sharded = 1
    assert PatchedCall(open_channel(MPI.COMM_SELF)).shard(rows, rows).options().deterministic


def test_a_loop_of_the_script_is_an_error() -> None:
    loop = SCRIPT.parent / "custom_loop.py"
    done = run_script(2, LAUNCHER, "--stages", "2", str(loop), timeout=120)
    assert done.returncode != 0
    assert "a loop of the script's own applies gradients" in done.stderr
