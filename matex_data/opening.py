"""``open_dataset``: resolve the paths, index the files, and apply the transforms."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from matex_data._types import Io
from matex_data.dataset import Dataset
from matex_data.errors import DataError, FormatError, near_matches
from matex_data.fields import LISTED, WEIGHT, ElementSpec, Names, as_list
from matex_data.further import FurtherFields
from matex_data.index.chosen import Samples
from matex_data.index.model import Index
from matex_data.index.paths import PathTable
from matex_data.index.runs import Runs
from matex_data.indexing import Reading, index_files, resolve_format, share_facts, text_of
from matex_data.io.sessions import read_sessions
from matex_data.memory import NAME, digest, index_arrays, is_in_memory
from matex_data.mpi.communicator import Communicator
from matex_data.paths import existing_files, natural_sorted, partitioned_files
from matex_data.readers import data_folders, files_of_folder, folder_format, refuse_folder
from matex_data.reading.source import Source
from matex_data.sampling.split import Ties
from matex_data.transforms.categories import encode_categories, requested_categories, without_categories
from matex_data.transforms.categories import one_hot as make_one_hot
from matex_data.transforms.continuity import find_continuing, sample_coordinate
from matex_data.transforms.evaluation import missing_engine
from matex_data.transforms.events import EventOptions
from matex_data.transforms.expressions import parse
from matex_data.transforms.file_fields import FileFields
from matex_data.transforms.imputing import Imputation, check_rules
from matex_data.transforms.missing import Missing, check_missing, fill_missing, find_complete
from matex_data.transforms.names import fields_to_read
from matex_data.transforms.new_fields import Derive, NewFields, named_by
from matex_data.transforms.pad import FIRST, Keep, Pad
from matex_data.transforms.stack import Stack, check_stack, stack_fields
from matex_data.transforms.static_fields import add_static_fields
from matex_data.transforms.weights import check_elements, check_weights
from matex_data.transforms.windows import sliding_windows, window_shape

if TYPE_CHECKING:
    from mpi4py import MPI

WITH_CATEGORIES = ("csv",)  # formats whose readers know all values of a column
STACKED = "inputs"  # name of the field of stack=True

Arrays = Any
"""Dict of arrays, ``pandas.DataFrame`` or ``xarray.Dataset``."""
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def open_dataset(
    paths: Paths | Arrays,
    *,
    format: str | None = None,
    inputs: Names = None,
    targets: Names = None,
    weights: str | None = None,
    comm: MPI.Intracomm | None = None,
    where: str | None = None,
    file_fields: FileFields | None = None,
    derive: Derive | None = None,
    one_hot: Names = None,
    flatten: Names = None,
    pad: Pad | None = None,
    keep: Keep = FIRST,
    stack: Stack = False,
    static_as_inputs: bool = False,
    window: int | None = None,
    stride: int = 1,
    horizon: int | None = None,
    lead: int = 1,
    along: str | None = None,
    io: Io = "auto",
    window_bytes: int | None = None,
    block_bytes: int | None = None,
    global_reads: Literal["memory", "rows"] = "memory",
    cache: Literal["memory"] | None = None,
    missing: Missing = "nan",
    on_error: Literal["raise", "skip"] = "raise",
    index: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Dataset:
    """Open files of one schema as one data set. *Collective*.

    One rank reads the metadata of each file. Every rank gets the result, or the error.

    Parameters
    ----------
    paths : str, path, or list of these. A path, a glob or a directory. The files of a glob or a directory are sorted by
        name, with numbers by value: file2 before file10. Or arrays in memory, equal on all ranks: a dict of arrays by
        name, a ``pandas.DataFrame``, or an ``xarray.Dataset``, with ``sample_dim=`` if its samples are not along the
        first dimension of its first variable.
    format : str, such as "hdf5". None: detected from the first bytes of the files, then from their suffix.
    inputs, targets : str, or list of str. Names of fields. Neither: an element is a dict of all fields. Only inputs:
        ``x``. Both: ``(x, y)``. A list gives a dict by name, and so does a pattern such as ``"Muon_*"``, which stands
        for all fields that match it.
    weights : str. Name of a numeric field, or an expression as of ``derive``, such as ``"genWeight * xsec"``, whose
        values, as float32, are the sample weights: elements are ``(x, y, w)``, or dicts with ``"sample_weight"``.
    comm : mpi4py.MPI.Intracomm. The ranks that share the data. None: all ranks.
    where : str. Select the samples for which an expression is true when the data are opened:
        ``"(MET > 30) & (count(Jet_pt > 30) >= 2)"``, ``"species == 'Adelie'"``. See ``derive``.
    file_fields : dict of fields that follow from the name of the file, each a dict of values by pattern:
        ``{"label": {"sig_*.root": 1, "bkg_*.root": 0}}``. Numbers or texts; each file fits exactly one pattern of a
        field, which may name folders: ``"signal/*.root"``. They are fields like others, for ``targets``, ``weights``
        and ``where``, but patterns of ``inputs`` do not stand for them.
    derive : dict of fields that are made of others, each an expression by name: ``{"log_pt": "log(pt)"}``. Expressions
        have fields, numbers, ``+ - * / % **``, comparisons, ``& | ~`` and numexpr's functions. A name that is no Python
        identifier stands in backticks: ``"`jets/pt` > 30"``. Of ragged fields ``"Jet_pt > 30"`` has as many elements;
        ``sum``, ``count``, ``min``, ``max``, ``mean``, ``any`` and ``all`` make one number for each sample, of fields
        with a shape as well. Texts and categories are compared with texts. The fields are like others, for inputs,
        targets, ``where``, other derived fields and splits; patterns of ``inputs`` do not stand for them.
    one_hot : str, or list of str. Fields of texts, categories or integers that become vectors of float32 with an entry
        for each of the sorted values of all samples, which the attribute ``categories`` of the field lists. Missing
        values have zeros alone.
    flatten : str, or list of str. Names or patterns (``"Muon_*"``) of ragged fields of the same objects. The objects
        are the samples; the other fields of their event are repeated.
    pad : dict of int by name or pattern, such as ``{"Muon_*": 8}``. The ragged field becomes dense, of shape (8,), with
        zeros behind, and the field ``<name>_mask`` is True for real elements.
    keep : elements that ``pad`` keeps if there are more. "first"; or the name of a ragged field of the same objects,
        by which they are sorted in descending order; or a dict of these by name or pattern of the padded fields.
    stack : bool or str. Stack ``inputs``, numeric fields of one shape, into one array, the field "inputs". True or
        "last": the fields are the last axis, in the order of ``inputs``, as channels of Keras: (samples, ..., fields).
        "first": (samples, fields, ...). A field with one more axis in front, such as levels, gives as many channels.
    static_as_inputs : bool. Arrays that belong to no sample, such as an orography in a netCDF file, may be named by
        ``inputs`` and ``targets``, and each sample has the whole array, that of the first file. Without names, all
        such arrays with two or more axes are fields.
    window : int, in samples. Each sample of the data set is ``window`` consecutive samples of the files, of shape
        (window, ...). With ``horizon`` or ``targets``, the target is the ``horizon`` samples behind the window, of
        shape (horizon, ...): those of ``targets``, or else those of ``inputs``.
    stride : int, in samples. Distance between the beginnings of two windows. ``Dataset.split`` leaves out windows that
        would share samples of the files with those of another set.
    horizon : int, in samples. Length of the target behind a window; 1 by default if there are targets.
    lead : int of 0 or more, in samples. Distance from the last sample of a window to the first one of its target: 12
        for a target three days ahead of samples every six hours. Only the samples of the window and of the target are
        read.
    along : str. Numeric field with one number for each sample, such as "time", that tells whether a file continues the
        one before: if its values go on evenly, windows reach from one file into the next; otherwise they end with the
        file, and rank 0 warns once. None: the coordinate of the sample dimension of netCDF files; windows of other
        formats end with their file.
    io : "collective": all ranks make every read together. "independent": each rank reads on its own. "auto":
        collective, unless there are many files or only one rank.
    window_bytes : int, in bytes over all ranks. Limit on the samples that are shuffled together. Determines the
        shuffled order. None: 128 MiB; more with large batches, up to twice their bytes or a 256th of the data set. Some
        six windows are in memory, divided between the ranks; it is an error if those do not fit.
    block_bytes : int, in bytes. Neighbouring samples that are read and shuffled as one block, where single rows can be
        read or chunks are smaller. Larger blocks suit file systems with slow small reads, and shuffle less well.
        Determines the shuffled order. None: 64 to 256 KiB, depending on the batch size; less for small files, up to
        1 MiB for a data set of 1 TB.
    global_reads : access to the samples with ``shuffle="global"``. "memory": each rank reads its shard once and keeps
        it, and the ranks exchange samples. "rows": each rank reads single rows in every epoch, for rows of fixed size
        that do not fit into the memory.
    cache : "memory": each rank reads its shard once, keeps it for all epochs, and shuffles it as a whole. None: read in
        every epoch.
    missing : treatment of missing numbers, which are NaN. "nan": keep them. A number: replace them by it. "mask":
        replace them by 0; the field ``<name>_mask`` is True for all other numbers. "drop": leave out samples with any,
        and those with missing texts, which are empty, or codes of no category, which are -1; this takes one read of
        the data when it is opened. A dict by field or pattern, ``{"age": "mean", "sex": "mode", "*": 0}``: numbers,
        the mean, the most frequent value of numbers, texts or categories, or "nan" to keep them. Means and modes are
        those of all samples, and after ``split`` or ``kfold`` those of the first set, which all sets get.
    on_error : treatment of samples that cannot be read: damaged chunks and images, rows that do not parse. "raise": all
        ranks raise the error. "skip": leave them out of their batches, which become smaller (with ``remainder="pad"``,
        padding of sample weight 0 replaces them). The number of steps stays. Rank 0 warns at the end of each epoch, and
        ``Dataset.skipped`` lists them. Errors in the metadata of a file, and files that have changed when an epoch
        begins, are raised in any case, and so is an epoch of which no sample can be read.
    index : str or path. File in which the index of the files is stored, for data sets of many files: the first job
        writes it, and later ones only compare the sizes and times of the files with it, each rank of its share. Files
        that have changed are indexed anew, with a warning. Only the files of the data set are compared, not those that
        they refer to (external and virtual datasets of HDF5).
    options : options of the format's reader. ``dtype={"species": "category"}`` is one of every format: the field has
        codes, int32, which are positions in the sorted values of all samples, and -1 for missing ones; the attribute
        ``categories`` of the field lists the values.

    Notes
    -----
    The options apply in the order ``file_fields``, ``derive``, ``where``, ``flatten``, ``pad``, ``one_hot``, ``stack``,
    ``window``, ``missing``.

    Returns
    -------
    Dataset of the samples of all files, in the order of the files.

    Raises
    ------
    FieldNotFound : a field does not exist.
    FormatError : a file is damaged or of another format, or the files differ in their fields.
    DataError : a file does not exist, or cannot be read.
    PartitionError : the arguments differ between the ranks, or a rank does not call within ``MATEX_TIMEOUT`` seconds.

    Examples
    --------
    >>> import matex_data as md
    >>> md.open_dataset("events.h5")
    Dataset(100 samples of 1 file; energy: float32[], image: uint8[8, 8], label: int64[])
    >>> data = md.open_dataset("events.h5", inputs="image", targets="label")
    >>> x, y = next(iter(data.batches(10)))
    >>> x.shape, y.shape
    ((10, 8, 8), (10,))
    >>> series = md.open_dataset("events.h5", inputs="energy", window=24, horizon=6)
    >>> x, y = next(iter(series.batches(10)))
    >>> x.shape, y.shape
    ((10, 24), (10, 6))
    >>> high = md.open_dataset("events.h5", inputs="image", targets="label", weights="energy", where="energy > 5")
    >>> x, y, w = next(iter(high.batches(10)))
    >>> w.shape, len(high) < 100
    ((10,), True)
    >>> len(md.open_dataset("events.h5", index="events.matex")), len(md.open_dataset("events.h5", index="events.matex"))
    (100, 100)
    >>> md.open_dataset({"x": np.zeros((10, 3)), "y": np.arange(10)}, inputs="x", targets="y")
    Dataset(10 samples in memory; x: float64[3], y: int64[])
    >>> years = {"year": {"events*": 2016, "more*": 2017}}
    >>> set(md.open_dataset("events.h5", inputs="energy", targets="year", file_fields=years).load()["year"].tolist())
    {2016}
    >>> made = {"log_energy": "log(energy + 1)", "brightest": "max(image)"}
    >>> data = md.open_dataset("events.h5", inputs=["log_energy", "brightest"], derive=made, where="brightest > 200")
    >>> data.schema["brightest"].shape, bool((data.load()["brightest"] > 200).all())
    ((), True)
    """
    check_missing(missing)
    if isinstance(missing, Mapping):
        check_rules(missing)
    check_stack(stack)
    elements = ElementSpec(inputs, targets, weights)
    check_elements(elements)
    events = EventOptions(where, tuple(as_list(flatten)), pad or {}, keep)
    events.check(window, weights)
    created = NewFields.of(file_fields, derive)
    sessions = read_sessions(comm)
    arguments = (
        f"{inputs=}, {targets=}, {weights=}, {format=}, {where=}, {file_fields=}, {derive=}, {one_hot=}, {flatten=}, "
        f"{pad=}, {keep=}, {stack=}, {static_as_inputs=}, {window=}, {stride=}, {horizon=}, {lead=}, {along=}, {io=}, "
        f"{window_bytes=}, {block_bytes=}, {global_reads=}, {cache=}, "
        f"{missing=}, {on_error=}, {index=}, options={text_of(options)}"
    )
    held = _hold(sessions.comm, paths, arguments, format, index, options) if is_in_memory(paths) else None
    files: Sequence[str] = _resolve(sessions.comm, paths, format, arguments) if held is None else PathTable.of([NAME])
    io = io if held is None else "independent"
    if static_as_inputs:
        options["static_as_inputs"] = True
    categories = requested_categories(options)
    if categories and (held is not None or _makes_no_categories(sessions.comm, files[0], format, options)):
        options = without_categories(options)
    else:
        categories = []
    if weights is not None and weights not in created:
        probe = Reading(format, [weights], options, memory=held)
        elements, created = _with_weights(sessions.comm, files, probe, elements, created)
    if created.expressions or where is not None:
        sessions.comm.agree(missing_engine())
    made = [STACKED] if stack else []
    masked = ["*"] if missing == "mask" or isinstance(missing, Mapping) else list(events.pad)
    names = events.fields_to_read(fields_to_read(elements.required, masked, *made, *created.expressions))
    names = created.to_read(None if names is None else [*names, *created.expressions])
    shape = None if window is None else window_shape(window, stride, horizon, lead, targets)
    spans_files = shape is not None and len(files) > 1
    if names is not None and along is not None and spans_files:
        names = list(dict.fromkeys([*names, along]))
    reading = Reading(format, names, options, coordinate=spans_files and along is None, memory=held)
    found = index_files(sessions.comm, files, reading, None if index is None else os.fspath(index))
    if files == found.files.paths:  # which the ranks of a machine have once
        files = found.files.paths
    elements = elements.expanded(found.fields)
    _check_selected(found, "sel" in options)
    opened = partial(Source, sessions, io=io, window_bytes=window_bytes, cache=None, on_error=on_error)
    coded = [name for name in categories if names is None or name in names or name in created]
    encode = partial(encode_categories, names=coded, opened=opened)
    found = created.add(add_static_fields(found, names) if static_as_inputs else found, encode=encode)
    along = along or sample_coordinate(found.fields)
    continues = find_continuing(opened, found, along) if spans_files and along is not None else None
    samples: Samples | None
    rows = found.files.rows
    found, samples, identity, flat = events.apply(found, opened, elements)
    check_weights(elements, found.fields)
    found = make_one_hot(found, as_list(one_hot), opened)
    if stack:
        others = dict.fromkeys([*as_list(elements.targets), *as_list(elements.weights)])
        kept = [name for name in others if name in found.fields]
        found = stack_fields(found, as_list(elements.inputs), STACKED, kept, stack)
        elements = replace(elements, inputs=STACKED)
    ties = Ties() if flat is None else Ties(events=flat.events)
    reshape = _unchanged if flat is None else flat.reshape
    if shape is not None:
        slid = sliding_windows(found, elements.inputs, elements.targets, shape, continues)
        found, elements, ties = slid.index, ElementSpec(elements.inputs, slid.targets), slid.ties
        reshape = slid.reshape
    filled = fill_missing(found, missing, elements.names)
    share_facts(sessions.comm, filled.files)
    source = Source(sessions, filled, io, window_bytes, cache, block_bytes, global_reads, identity, on_error)
    samples = find_complete(source, samples) if missing == "drop" else samples
    imputation = Imputation.of(missing, filled.fields, identity) if isinstance(missing, Mapping) else None
    if imputation is not None:
        source = imputation.fitted(source, samples or Runs(np.array([0]), np.array([len(filled)])))
        imputation = imputation if imputation.learns else None
    further = FurtherFields(sessions.comm, files, reading, created, rows, opened, reshape)
    return Dataset(source, elements, samples, ties, further.open, imputation=imputation)


def _check_selected(index: Index, by_value: bool) -> None:
    """Raise ``FormatError`` if ``sel=`` selects no sample, or lists samples by value that the files do not have."""
    listed = index.facts.get(LISTED)
    if len(index) != int(listed) if listed is not None else by_value and not len(index):
        raise FormatError(
            "sel= names samples that the files do not have",
            file=index.files.paths[0],
            expected="one sample at least" if listed is None else f"{listed} samples, one for each value",
            found=f"{len(index)}",
            remedy='correct the values; a slice selects what there is, such as slice("2015-01", "2015-03")',
        )


def _unchanged(index: Index) -> Index:
    return index


def _makes_no_categories(comm: Communicator, path: str, format: str | None, options: dict[str, Any]) -> bool:
    """Return whether the reader of a file knows no vocabularies, which are then made here. *Collective*."""
    return resolve_format(comm, path, format, options) not in WITH_CATEGORIES


def _hold(
    comm: Communicator,
    arrays: Any,
    arguments: str,
    format: str | None,
    stored: str | os.PathLike[str] | None,
    options: dict[str, Any],
) -> Index:
    """Return the index of arrays in memory, after a look at whether all ranks have equal ones. *Collective*.

    Raises
    ------
    DataError : the arrays are no data set; options are given that only files have.
    PartitionError : the arguments, or the arrays, differ between the ranks.
    """
    held, error = None, None
    try:
        unknown = [name for name in options if name != "sample_dim"]
        unknown += [name for name, value in (("format", format), ("index", stored)) if value is not None]
        if unknown:
            raise DataError(f"{unknown[0]}= is an option of files", expected="files", found="arrays in memory")
        held = index_arrays(arrays, options.get("sample_dim"))
    except DataError as failure:
        error = failure
    comm.agree(error)
    assert held is not None
    if comm.size > 1:
        comm.check_equal(
            f"{arguments}, {digest(held)}",
            "the ranks open different arrays",
            "give all samples on every rank, or write them to a file that all ranks open",
        )
    return held


def _with_weights(
    comm: Communicator, files: Sequence[str], reading: Reading, elements: ElementSpec, created: NewFields
) -> tuple[ElementSpec, NewFields]:
    """Return the elements with the name of the weights, and the new fields with their expression. *Collective*.

    A field of the first file is no expression, although ``jets/weight`` might be one.

    Parameters
    ----------
    comm : the ranks.
    files : paths of the files.
    reading : of a field with the name of the weights.
    elements, created : as the user gave them.
    """
    text = elements.weights or ""
    wrong: FormatError | None = None
    try:
        expression = parse(text, "weights=")
        name = named_by(expression)
        if name is not None:
            return replace(elements, weights=name), created
    except FormatError as error:
        wrong = error
    try:
        index_files(comm, files[:1], reading, None)
    except DataError as no_field:  # opening all files raises any other one as well
        if wrong is not None:
            raise (wrong if set(text) & set("()*+") else no_field) from wrong
        expressions = {**created.expressions, WEIGHT: expression}
        return replace(elements, weights=WEIGHT), replace(created, expressions=expressions)
    return elements, created


def _resolve(comm: Communicator, paths: Paths, format: str | None, arguments: str) -> PathTable:
    """Return the files of ``paths``, as rank 0 finds them; so a thousand ranks do not list a folder. *Collective*.

    Parameters
    ----------
    comm : the ranks.
    paths, format : arguments of ``open_dataset``.
    arguments : all its other arguments as text, which the ranks compare.

    Raises
    ------
    DataError : there are no such files.
    PartitionError : the arguments differ between the ranks.
    """
    files: list[str] = []
    error: DataError | None = None
    if comm.rank == 0:
        try:
            files = expand(paths, format)
        except DataError as not_found:
            error = not_found
    comm.agree(error)
    packed: PathTable = comm.broadcast(PathTable.of(files))
    remedy = "call open_dataset with the same arguments on every rank"
    comm.check_equal(arguments, "the ranks open different data sets", remedy)
    return packed


def expand(paths: Paths, format: str | None = None) -> list[str]:
    """Return the files of a path, a glob, a directory or a list of these, sorted within each.

    A directory that is a data set as a whole, such as a folder of images, stands for itself.

    Parameters
    ----------
    format : name of the format; None: detected.

    Raises
    ------
    DataError : there are no such files.
    """
    if isinstance(paths, str | os.PathLike):
        return _expand_one(os.fspath(paths), format)
    given = [os.fspath(path) for path in paths]
    files = existing_files(given)
    expanded = [file for path in given for file in ([path] if path in files else _expand_one(path, format))]
    if not expanded:
        raise DataError("the list of files is empty", expected="at least one path", found=paths)
    return expanded


def _expand_one(path: str, format: str | None) -> list[str]:
    location = Path(path)
    if location.is_file():
        return [path]
    if location.is_dir():
        if folder_format(path, format):
            return [path]
        with os.scandir(path) as listed:  # of which most file systems tell the type at once
            entries = list(listed)
        refuse_folder(path, {entry.name for entry in entries})
        folders = data_folders([entry.path for entry in entries if entry.is_dir()])
        files = folders or files_of_folder([file.path for file in partitioned_files(entries)])
    else:
        found = glob.glob(path, recursive=True)  # noqa: PTH207 (absolute too)
        files = [*existing_files(found), *data_folders(found)]
    if files:
        return natural_sorted(files)
    folder = location.parent
    siblings = [p.name for p in folder.iterdir()] if folder.is_dir() else []
    raise DataError(
        "no such file" if not location.is_dir() else "the directory holds no files",
        file=path,
        found=f"in its folder: {near_matches(location.name, siblings)}" if siblings else f"no folder {str(folder)!r}",
        remedy="check the path; a relative path begins at the working directory",
    )
