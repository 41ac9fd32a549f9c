"""The command line of ``matex run``, parsed without MPI: the option -n starts the ranks."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

MODES = ("always", "proven", "first", "never")
"""Values of ``--verify``."""
FLAGS = {
    "--sync-batch-norm": "normalize by the global batch",
    "--shard-optimizer": "cut the optimizer's state over the ranks",
    "--all-output": "print the output of every rank, not of rank 0 alone",
}
"""Options without a value, with their help; ``--no-verify`` and ``--help`` have none, either."""


class Arguments(NamedTuple):
    """Command line of ``matex run``.

    Attributes
    ----------
    ranks : value of ``-n``; None without it.
    of_ranks : the command line without ``-n``, for each rank.
    of_run : parameters of ``matex_data.training.launcher.run.run``.
    """

    ranks: str | None
    of_ranks: list[str]
    of_run: dict[str, Any]


def parse(arguments: Sequence[str]) -> Arguments:
    """Return the parts of a command line; exit with a message if it is wrong.

    Examples
    --------
    >>> parse(["-n", "4", "--no-verify", "-m", "train", "-n", "7"]).of_ranks
    ['--no-verify', '-m', 'train', '-n', '7']
    """
    parser = _parser()
    own, without_ranks, program = _split(arguments)
    given = {name: value for name, value in vars(parser.parse_args(own)).items() if name not in ("module", "program")}
    as_module = program[:1] == ["-m"]
    if len(program) <= as_module:
        parser.error("name a script, or a module after -m")
    name, *passed = program[as_module:]
    script = None if as_module else Path(name)
    of_run = {**given, "script": script or name, "arguments": passed, "as_module": as_module}
    alone = given["strategy"] == "chained" and given["model"] == given["stages"] == 1
    if given["collectives"] == "tensorflow" and not alone:
        parser.error("--collectives tensorflow is for --strategy chained, and not for --model and --stages")
    if given["save_every"] and given["checkpoint"] is None:
        parser.error("--save-every is for --checkpoint FOLDER")
    if given["micro_batches"] and given["stages"] == 1:
        parser.error("--micro-batches is for --stages")
    if script is not None and not script.exists():
        parser.error(f"there is no script {str(script)!r}")
    if script is not None and given["ranks"] is not None and not (script.is_file() or script.is_dir()):
        parser.error(f"only one process can read a script from {script}: write it to a file, which all ranks read")
    return Arguments(of_run.pop("ranks"), [*without_ranks, *program], of_run)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the options of ``matex run``, those of each rank, and what begins with the script or with -m."""
    own, without_ranks, rest = list[str](), list[str](), list(arguments)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        option = rest[0]
        if option.startswith("-m"):
            return own, without_ranks, ["-m", *filter(None, [option[2:]]), *rest[1:]]
        alone = option in (*FLAGS, "--no-verify", "--help", "-h", "--") or "=" in option
        count = 1 if alone or (option.startswith("-n") and option != "-n") else 2
        own += rest[:count]
        if not option.startswith(("-n", "--ranks=")) and option != "--ranks":
            without_ranks += rest[:count]
        del rest[:count]
    return own, without_ranks, rest


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more, found {text!r}")
    return int(text)


def _count_or_auto(text: str) -> Any:
    return text if text == "auto" else _count(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "matex run", description="Train a script written for one process on all ranks.", allow_abbrev=False
    )
    parser.add_argument(
        *("-n", "--ranks"),
        metavar="N",
        help="start N ranks, or auto: the tasks of the job, else the GPUs, else the cores",
    )
    parser.add_argument("--strategy", choices=("chained", "funneled", "concurrent"), default="chained")
    parser.add_argument("--wire-dtype", choices=("float16", "bfloat16"), help="send gradients in 16 bits")
    parser.add_argument(
        "--collectives",
        choices=("auto", "mpi", "tensorflow"),
        default=os.environ.get("MATEX_COLLECTIVES") or "auto",
        help="by which gradients are reduced; auto: by TensorFlow's where each rank has a GPU of its own, else by MPI",
    )
    parser.add_argument(
        "--verify", choices=MODES, default="proven", help="which steps are checked: see docs/training.md, Self-check"
    )
    parser.add_argument("--no-verify", dest="verify", action="store_const", const="never", help="--verify never")
    parser.add_argument("--model", type=_count, default=1, metavar="N", help="cut weights of each layer over N ranks")
    parser.add_argument("--stages", type=_count, default=1, help="cut the layers of models over this number of ranks")
    parser.add_argument(
        "--micro-batches", type=_count_or_auto, metavar="N", help="into which a batch is divided, or auto"
    )
    parser.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="save training here, and go on from there")
    parser.add_argument("--save-every", type=_count, metavar="STEPS", help="save within epochs, too, with --checkpoint")
    for name, text in FLAGS.items():
        parser.add_argument(name, action="store_true", help=text)
    parser.add_argument("-m", dest="module", metavar="package.module", help="run a module as a script, like python -m")
    parser.add_argument("program", nargs="*", metavar="script", help="and its own arguments")
    return parser
