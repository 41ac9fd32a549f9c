"""Commands ``matex inspect | plan | validate | bench | run | doctor``, also ``python -m matex_data``."""

from __future__ import annotations

import json
import math
import os
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from matex_data import __version__
from matex_data.cli.report import Report, print_error, report
from matex_data.errors import DataError, FormatError, NoMpiLibrary, RanksNotConnected, install_command
from matex_data.mpi.launch_errors import print_launch_error
from matex_data.progress import shown
from matex_data.storage.objects import is_url
from matex_data.words import counted

if TYPE_CHECKING:
    from matex_data.doctor.report import Section


VARIABLE = "PYTHONHASHSEED"


def restart_with_hash_seed() -> None:
    """Start this program once more with a fixed ``PYTHONHASHSEED``, unless it is set.

    Python draws the seed when it starts, on each rank another one. Call it before MPI begins and before heavy imports.
    The process keeps its id and its open files, by which a rank speaks to its launcher; its children inherit the seed.
    """
    if VARIABLE in os.environ:
        return
    os.environ[VARIABLE] = "0"
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


app = typer.Typer(add_completion=False, no_args_is_help=True, invoke_without_command=True)

PathArguments = Annotated[list[str], typer.Argument(help="Files, glob patterns or directories of one dataset.")]
FormatName = Annotated[str | None, typer.Option(help="Name of the format; detected from the files by default.")]
FieldNames = Annotated[list[str] | None, typer.Option("--field", help="Field to read; may be repeated. Default: all.")]

Limit = Annotated[float, typer.Option(help="Seconds in which the HDF5 library has to open a file or to read a block.")]


def main() -> None:
    """Run the command ``matex``."""
    if sys.argv[1:2] == ["run"]:
        restart_with_hash_seed()
    try:
        app()
    except (NoMpiLibrary, RanksNotConnected) as error:
        print_launch_error(error)
        sys.exit(1)


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", help="Show the version.", is_eager=True)] = False,
) -> None:
    """Load scientific data for data-parallel training."""
    if version:
        typer.echo(f"matex_data {__version__}")
        raise typer.Exit


Options = Annotated[list[str] | None, typer.Option("--option", help="Option of the reader: name=value; repeatable.")]
Html = Annotated[Path | None, typer.Option(help="File of a page with the same tables, and pictures.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command(epilog='Example: matex inspect "run*.nc" --option sample_dim=time --plot samples.png')
def inspect(
    paths: PathArguments,
    format: FormatName = None,
    field: FieldNames = None,
    batch_size: Annotated[int, typer.Option(help="Samples of a global batch, for the quality of the shuffle.")] = 256,
    option: Options = None,
    plot: Annotated[Path | None, typer.Option(help="File of a picture of the first samples.")] = None,
    as_json: Json = False,
    html: Html = None,
) -> None:
    """Show files, fields, layout and first samples of a data set, and what may make it slow."""
    from matex_data.cli import inspecting

    with report(html, f"matex inspect {' '.join(paths)}") as output:
        try:
            data = _open(output, paths, format, field, option)
        except FormatError as error:  # such as fields of different lengths, of which one has to select some
            if not output.console.quiet and not as_json and error.file is not None:
                _print_tree(output, error.file, format)
            raise
        if output.console.quiet:
            return
        if not as_json:
            _print_tree(output, data.paths[0], format)
        facts = inspecting.facts_of(data, _format_of(data.paths[0], format), batch_size)
        for item in [json.dumps(facts, indent=1)] if as_json else inspecting.tables(facts):
            output.print(item)
        if plot is not None or html is not None:
            output.add_picture(data.plot(plot), "First samples of each field")


@app.command(epilog='Example: mpiexec -n 4 matex stats "run*.h5" --field energy')
def stats(
    paths: PathArguments,
    format: FormatName = None,
    field: FieldNames = None,
    option: Options = None,
    as_json: Json = False,
    html: Html = None,
) -> None:
    """Show mean, standard deviation, range and missing values of all numeric fields, in one read of the data."""
    with report(html, f"matex stats {' '.join(paths)}") as output:
        data = _open(output, paths, format, field, option)
        rows = _statistics(output, data, "reading", "mean", "std", "min", "max", "count", "missing")
        if as_json:
            known = {
                name: {column: value if math.isfinite(value) else None for column, value in row.items()}
                for name, row in rows.items()
            }
            output.print(json.dumps(known, indent=1))
        else:
            output.print(_table(rows))


@app.command(epilog='Example: matex plan "run*.h5" --ranks 1024 --batch-size 65536')
def plan(
    paths: Annotated[
        list[str] | None, typer.Argument(help="Files of one dataset; with --train, arguments of the script, behind --.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Number of ranks of the job.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples of a global batch; a multiple of the ranks.")] = None,
    format: FormatName = None,
    field: FieldNames = None,
    option: Options = None,
    ranks_per_node: Annotated[
        int | None, typer.Option(help="Ranks of a machine, for its memory; with --train, the cores by default.", min=1)
    ] = None,
    shuffle: Annotated[str, typer.Option(help='Order of the samples: "blocks", "global" or "none".')] = "blocks",
    window_bytes: Annotated[int | None, typer.Option(help="Like window_bytes= of open_dataset.")] = None,
    block_bytes: Annotated[int | None, typer.Option(help="Like block_bytes= of open_dataset.")] = None,
    plot: Annotated[Path | None, typer.Option(help="File of a picture over the number of ranks.")] = None,
    train: Annotated[
        Path | None, typer.Option(help="Keras script: measure some of its steps here, predict those of --nodes.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Number of machines, with --train.", min=1)] = None,
    network: Annotated[str | None, typer.Option(help="Link of a node and latency: 100Gb/s,2us.")] = None,
    filesystem: Annotated[str | None, typer.Option(help="Speed of the file system for all nodes: 50GB/s.")] = None,
    weak: Annotated[bool, typer.Option("--weak", help="Each rank gets the script's batch, not its share.")] = False,
    as_json: Json = False,
) -> None:
    """Show what an epoch costs on any number of ranks: bytes, reads, memory; no data are read.

    With --train: run a Keras script for a few steps, and predict its steps on any number of nodes.
    """
    from matex_data.cli import planning
    from matex_data.display import save_picture

    sizes = {"window_bytes": window_bytes, "block_bytes": block_bytes}
    with report() as output:
        if train is not None:
            of_data = {"--ranks": ranks, "--batch-size": batch_size, "--format": format, "--field": field} | sizes
            planning.refuse(of_data | {"--option": option, "--plot": plot}, "leave it out, or --train")
            behind = sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []
            files = (paths or [])[: len(paths or []) - len(behind)]
            planning.refuse(
                dict.fromkeys(files, True), "leave it out, or --train; give arguments of the script behind --"
            )
            job = nodes or 1, ranks_per_node, network, filesystem, weak
            planning.show(output, train, paths or [], *job, as_json)
            return
        of_job = {"--nodes": nodes, "--network": network, "--filesystem": filesystem, "--weak": weak}
        planning.refuse(of_job, "give --train script.py")
        if not paths or ranks is None or batch_size is None:
            expected = "files, --ranks and --batch-size; or --train script.py and --nodes"
            raise DataError("matex plan lacks arguments", expected=expected, remedy="see matex plan --help")
        if shuffle not in planning.SHUFFLES:
            raise DataError("unknown shuffle", expected=f"--shuffle of {list(planning.SHUFFLES)}", found=repr(shuffle))
        order = planning.SHUFFLES[shuffle]
        given = {name: size for name, size in sizes.items() if size is not None}
        data = _open(output, paths, format, field, option, **given)
        if batch_size > len(data):
            raise DataError(
                "there are fewer samples than a batch has",
                expected=f"at least {batch_size} samples, as --batch-size says",
                found=counted(len(data), "sample"),
                remedy="choose a smaller --batch-size",
            )
        costs = data.read_plan(batch_size, ranks=ranks, shuffle=order, ranks_per_node=ranks_per_node)
        output.print(json.dumps(costs.as_dict(), indent=1) if as_json else str(costs))
        if plot is not None and not output.console.quiet:
            save_picture(planning.draw(planning.costs_by_ranks(data, batch_size, ranks, order)), plot)


@app.command(epilog='Example: matex index "day*.nc" --to days.json')
def index(
    paths: PathArguments,
    to: Annotated[str, typer.Option(help="A file for JSON; a folder for Parquet if the name ends with .parquet.")],
    sample_dim: Annotated[str | None, typer.Option(help="Dimension along which the files follow one another.")] = None,
) -> None:
    """Write references to the chunks of netCDF, HDF5 or TIFF files, which xarray opens as one Zarr store."""
    from matex_data.opening.given import expand

    with report() as output:
        if output.console.quiet:  # rank 0 writes
            return
        found = _references(expand(paths), sample_dim)
        found.write(to)
        chunks = sum(isinstance(entry, list) for entry in found.entries.values())
        output.print(f"{to}: {counted(chunks, 'chunk')}")
        if trees := found.trees(to):
            output.print(f"the chunks lie elsewhere: open_dataset({to!r}, trusted={trees!r})")
        for name, reason in found.left_out.items():
            output.print(f"left out: {name!r}: {reason}")


@app.command(epilog='Example: mpiexec -n 4 matex validate "run*.h5"')
def validate(
    paths: PathArguments,
    format: FormatName = None,
    field: FieldNames = None,
    option: Options = None,
    batch_size: Annotated[int, typer.Option(help="Samples that are read at once.")] = 1024,
    limit: Limit = 60.0,
    html: Html = None,
) -> None:
    """Read and decode every sample, list what is damaged, and count missing values of the rest; exit with 1 on damage.

    Open HDF5 and netCDF-4 files in a child process first, since the HDF5 library crashes on some damaged files.
    """
    from matex_data.reading.skipping import by_damage

    with report(html, f"matex validate {' '.join(paths)}") as output:
        _check_hdf5(paths, format, field, option, limit)
        chosen = [text for text in option or () if text.startswith(("where=", "missing="))]
        if chosen:
            raise DataError("all samples are read as they are", found=f"--option {chosen[0]}", remedy="leave it out")
        data = _open(output, paths, format, field, option, on_error="skip")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* and are skipped:")  # the list is below
            _read_all(output, data, batch_size)
            damaged = len(data.skipped)
            columns = "missing", "min", "mean", "max"
            any_left = damaged < len(data) and _numeric(data)
            rows = _statistics(output, data, "counting missing values", *columns) if any_left else {}
        output.print(f"{counted(len(data) - damaged, 'sample')} without damage")
        for line in by_damage(data.skipped):
            output.print(line)
        output.print(_table(rows))
    if damaged:
        raise typer.Exit(1)


@app.command(epilog='Example: mpiexec -n 2 matex bench "run*.h5" --batch-size 256')
def bench(
    paths: PathArguments,
    format: FormatName = None,
    field: FieldNames = None,
    option: Options = None,
    batch_size: Annotated[int, typer.Option(help="Samples of a global batch.")] = 256,
    epochs: Annotated[int, typer.Option(help="Number of epochs; the first one may find cold caches.", min=1)] = 3,
    html: Html = None,
) -> None:
    """Measure shuffled epochs, and the speed of plain reads of the same files."""
    with report(html, f"matex bench {' '.join(paths)}") as output:
        data = _open(output, paths, format, field, option)
        ranks = data.ranks
        batches = data.batches(-(-batch_size // ranks) * ranks, shuffle=True, seed=0, remainder="keep")
        table = Table("epoch", "seconds", "samples/s", "decoded MB/s", "waiting for data")
        row_bytes = sum(value.row_bytes for value in data.schema.values())
        for epoch in range(epochs):
            waited, begin = data.profile.waiting, time.perf_counter()
            for _ in batches:
                pass
            seconds = time.perf_counter() - begin
            rate = len(data) / seconds
            share = (data.profile.waiting - waited) / seconds
            table.add_row(
                str(epoch), f"{seconds:.2f}", f"{rate:,.0f}", f"{rate * row_bytes / 1e6:,.0f}", f"{share:.0%}"
            )
        output.print(table)
        if not any(map(is_url, data.paths)):
            plain = _plain_speed(data.paths) / 1e6
            output.print(f"{counted(ranks, 'rank')}; plain reads of the stored bytes: {plain:,.0f} MB/s on a rank")
        output.print(_shuffle_quality(data, batches.schedule.batch_size))


@app.command()
def doctor(
    path: Annotated[str | None, typer.Argument(help="File or folder of data, whose file system is measured.")] = None,
    as_json: Json = False,
    tensorflow: Annotated[bool, typer.Option("--tensorflow", help="Also ask TensorFlow for its GPUs.")] = False,
) -> None:
    """Show what a job finds here, and what to change: MPI, launchers, cores, memory, storage. Exit with 1 on errors.

    Alone, it tries each launcher on two ranks. Under a launcher, it tells about all nodes of the job.
    """
    from matex_data.doctor import report as found
    from matex_data.doctor.examine import examine

    def show(sections: Sequence[Section]) -> None:
        if as_json:
            sys.stdout.write(f"{found.as_json(sections)}\n")
        else:
            found.show(sections, Console(file=sys.stdout))

    try:
        sound = examine(path, show, with_tensorflow=tensorflow)
    except DataError as error:
        print_error(error)
        raise typer.Exit(1) from None
    if not sound:
        raise typer.Exit(1)


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)
def run(context: typer.Context) -> None:
    """Run an unchanged Keras script on all ranks: matex run -n 4 script.py --option-of-the-script.

    Or a module, like python -m: matex run -n 4 -m package.module --option-of-the-module. Without -n, a launcher has to
    start the ranks: mpiexec -n 4 matex run script.py.
    """
    from matex_data.training.launcher.arguments import parse

    arguments = parse(context.args)
    if arguments.ranks is not None:
        _start_unless_started(arguments.ranks, ["run", *arguments.of_ranks])
    from matex_data.training.launcher.run import run

    run(**arguments.of_run)


def _start_unless_started(ranks: str, arguments: list[str]) -> None:
    """Replace this process by a launcher of ranks that run this program; return if it is one of these ranks."""
    from matex_data.launching.start import is_started, start

    try:
        if not is_started(ranks):
            program = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
            start(ranks, [sys.executable, *program, *arguments])
    except DataError as error:
        print_launch_error(error)
        raise typer.Exit(1) from None


def _open(
    output: Report,
    paths: list[str],
    format: str | None,
    fields: list[str] | None,
    options: list[str] | None,
    **more: Any,
) -> Any:
    """Return the data set; ``options`` are texts of ``--option``, and come before all else."""
    from matex_data.cli.inspecting import parse_options
    from matex_data.opening.open import open_dataset

    arguments: dict[str, Any] = {"format": format, "inputs": fields or None, **more, **parse_options(options or [])}
    with shown(output.console, "opening files"):
        return open_dataset(paths if len(paths) > 1 else paths[0], **arguments)


def _read_all(output: Report, data: Any, batch_size: int) -> None:
    """Read all samples, also where none can be read: ``data.skipped`` has those."""
    console, ranks = output.console, data.ranks
    batches = data.batches(-(-batch_size // ranks) * ranks, remainder="keep")
    silent = not console.is_terminal
    try:
        for _ in track(batches, "reading", total=len(batches), console=console, transient=True, disable=silent):
            pass
    except DataError:
        if len(data.skipped) < len(data):
            raise


def _shuffle_quality(data: Any, batch_size: int) -> str:
    """Return a line about the quality of the shuffle, with a remedy if it is low."""
    quality = data.shuffle_quality(batch_size)
    return f"shuffle: {quality}" + (f". {quality.remedy}" if quality.ratio > 2 else "")


def _check_hdf5(
    paths: list[str], format: str | None, fields: list[str] | None, options: list[str] | None, limit: float
) -> None:
    """Exit with the errors of all files that the HDF5 library cannot open. *Collective*."""
    from matex_data.cli.inspecting import parse_options
    from matex_data.cli.probing import is_hdf5, probe
    from matex_data.mpi.library import MPI
    from matex_data.opening.given import expand

    comm = MPI.COMM_WORLD
    files = [file for file in expand(paths, format) if is_hdf5(file)][comm.rank :: comm.size]
    errors = [
        error
        for errors in comm.allgather(probe(files, format, fields, limit, options=parse_options(options or [])))
        for error in errors
    ]
    for error in errors if comm.rank == 0 else ():
        print_error(error)
    if errors:
        raise typer.Exit(1)


def _print_tree(output: Report, path: str, format: str | None) -> None:
    """Print the groups of a file, unless its format has none, or its library cannot read it."""
    from matex_data.cli.inspecting import tree

    with suppress(DataError, OSError, RuntimeError, ValueError, KeyError):
        groups = tree(path, _format_of(path, format))
        if groups is not None:
            output.print(groups)


def _references(paths: list[str], sample_dim: str | None) -> Any:
    """Return references to the chunks of files; see `matex_data.readers.zarr.writing.references`."""
    try:
        from matex_data.readers.zarr import writing
    except ModuleNotFoundError as error:
        remedy = install_command("matex_data[csv,images,zarr]")
        raise DataError("references need a package that is not installed", found=error, remedy=remedy) from error
    if not paths or _format_of(paths[0], None) != "images":
        return writing.references(paths, sample_dim)
    if len(paths) > 1:
        expected, remedy = "one TIFF file", "write the references of each file"
        raise DataError("the files cannot be one store", file=paths[1], expected=expected, remedy=remedy)
    return writing.tiff_references(paths[0])


def _format_of(path: str, format: str | None) -> str:
    from matex_data.readers import detect, folder_format, read_head

    return format or folder_format(path) or detect(path, read_head(path))


def _numeric(data: Any) -> list[str]:
    """Return the fields of numbers, without lists."""
    return [name for name, field in data.schema.items() if field.dtype.kind in "biuf" and not field.ragged]


COUNTS = ("count", "missing")
"""Columns of statistics that are known also where a field has no value."""


def _statistics(output: Report, data: Any, work: str, *columns: str) -> dict[str, dict[str, float]]:
    """Return the statistics of all fields of numbers, by field and column; NaN without a value."""
    with shown(output.console, work):
        found = data.statistics(*_numeric(data))
    return {
        name: {c: float(getattr(row, c)) if row.count or c in COUNTS else math.nan for c in columns}
        for name, row in found.items()
    }


def _table(rows: dict[str, dict[str, float]]) -> Table:
    table = Table("field", *next(iter(rows.values()), ()))
    for name, row in rows.items():
        table.add_row(name, *(f"{value:,.0f}" if column in COUNTS else f"{value:g}" for column, value in row.items()))
    return table


def _plain_speed(paths: tuple[str, ...], limit: int = 1 << 30) -> float:
    """Return the bytes per second of plain reads of the files, at most the first GiB."""
    buffer = bytearray(8 << 20)
    read, begin = 0, time.perf_counter()
    files = (file for path in paths for file in ([Path(path)] if Path(path).is_file() else Path(path).rglob("*")))
    for path in filter(Path.is_file, files):
        with path.open("rb", buffering=0) as file:
            while read < limit and (count := file.readinto(buffer)):
                read += count
    return read / (time.perf_counter() - begin)
