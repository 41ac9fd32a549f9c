"""The command line of ``matex run``, parsed without MPI: the option -n starts the ranks."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

MODES = ("always", "proven", "first", "never")
"""Values of ``--verify``."""


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
    given = vars(parser.parse_args(arguments))
    script, of_script, of_module = given.pop("script"), given.pop("arguments"), given.pop("module")
    if of_module:
        (name, *passed), behind = of_module, len(of_module) + 1
        of_run = {**given, "script": name, "arguments": passed, "as_module": True}
    elif script is None or of_module is not None:
        parser.error("name a script, or a module after -m")
    else:
        of_run, behind = {**given, "script": script, "arguments": of_script}, len(of_script) + 1
    alone = given["strategy"] == "chained" and given["model"] == given["stages"] == 1
    if given["collectives"] == "tensorflow" and not alone:
        parser.error("--collectives tensorflow is for --strategy chained, and not for --model and --stages")
    if script is not None and not script.exists():
        parser.error(f"there is no script {str(script)!r}")
    if script is not None and given["ranks"] is not None and _is_pipe(script):
        parser.error(f"only one process can read a script from {script}: write it to a file, which all ranks read")
    own, others = list(arguments[: len(arguments) - behind]), list(arguments[len(arguments) - behind :])
    return Arguments(of_run.pop("ranks"), [*_without_ranks(own), *others], of_run)


def _is_pipe(path: Path) -> bool:
    return path.exists() and not (path.is_file() or path.is_dir())


def _without_ranks(options: Sequence[str]) -> list[str]:
    """Return options without each -n N, -nN, --ranks N and --ranks=N."""
    kept, remaining = [], iter(options)
    for option in remaining:
        if option in ("-n", "--ranks"):
            next(remaining)
        elif not option.startswith(("--ranks=", "-n")):
            kept.append(option)
    return kept


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
    parser.add_argument("--sync-batch-norm", action="store_true", help="normalize by the global batch")
    parser.add_argument(
        "--verify", choices=MODES, default="proven", help="which steps are checked: see docs/training.md, Self-check"
    )
    parser.add_argument("--no-verify", dest="verify", action="store_const", const="never", help="--verify never")
    parser.add_argument("--model", type=_count, default=1, metavar="N", help="cut weights of each layer over N ranks")
    parser.add_argument("--shard-optimizer", action="store_true", help="cut the optimizer's state over the ranks")
    parser.add_argument("--stages", type=_count, default=1, help="cut the layers of models over this number of ranks")
    parser.add_argument(
        "--micro-batches", type=_count_or_auto, metavar="N", help="into which a batch is divided, or auto"
    )
    parser.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="save training here, and go on from there")
    parser.add_argument("--save-every", type=_count, metavar="STEPS", help="save within epochs, too, with --checkpoint")
    parser.add_argument("--all-output", action="store_true", help="print the output of every rank, not of rank 0 alone")
    parser.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        metavar=("package.module", "arguments"),
        help="run a module as a script, like python -m",
    )
    parser.add_argument("script", nargs="?", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    return parser
