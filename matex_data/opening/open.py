"""``open_dataset``: look at the options, index the files, and make a data set of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal

from matex_data._types import Io
from matex_data.arguments import check_arguments
from matex_data.dataset import Dataset
from matex_data.epochs.adapting import refuse_own_rows
from matex_data.fields import Names
from matex_data.index.runs import Runs
from matex_data.index.whole import SAMPLE
from matex_data.io.sessions import read_sessions
from matex_data.machine import return_freed_memory
from matex_data.mpi.communicator import Communicator
from matex_data.opening.assembly import SampleOptions, assemble
from matex_data.opening.further import FurtherFields, is_known, refuse_hidden, with_weights
from matex_data.opening.given import Given, MemoryArrays, Paths, equal_on_all
from matex_data.opening.indexing import Reading, index_files, resolve_format, share_facts
from matex_data.reading.source import ReadOptions, open_source, taken
from matex_data.transforms.categories import without_categories
from matex_data.transforms.chained import Selected
from matex_data.transforms.file_fields import FileFields
from matex_data.transforms.missing import Missing, Sentinels
from matex_data.transforms.new_fields import Derive
from matex_data.transforms.pad import FIRST, Keep, Pad
from matex_data.transforms.patches import COUNT
from matex_data.transforms.stack import Stack
from matex_data.warning import warn

if TYPE_CHECKING:
    from mpi4py import MPI

MANY_FILES = 10_000  # whose entries take megabytes before they are columns
WITH_CATEGORIES = ("csv",)  # formats whose readers know all values of a column


def open_dataset(
    paths: Paths | MemoryArrays,
    *,
    format: str | None = None,
    sample: str | None = None,
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
    patch: Sequence[int | None] | int | None = None,
    patches_per_image: int | None = None,
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
    missing_values: Sentinels | None = None,
    absent: Mapping[str, bool | float | str | bytes] | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    index: str | os.PathLike[str] | None = None,
    trusted: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    **options: Any,
) -> Dataset:
    """Open files of one schema as one data set. *Collective*.

    One rank reads the metadata of each file. Every rank gets the result, or the error.

    Parameters
    ----------
    paths : str, path, or list of these. A path, a glob or a directory, also as the URL of a store of objects, such as
        ``"s3://bucket/run-*.h5"``. The files of a glob or a directory are sorted by name, with numbers by value: file2
        before file10. ``"train-{000..255}.tar"`` stands for as many files. Or arrays in memory, equal on all ranks: a
        dict of arrays by name, a ``pandas.DataFrame``, or an ``xarray.Dataset``, with ``sample_dim=`` if its samples
        lie along another dimension than that of its times, else the first one of its first variable.
    format : str, such as "hdf5". None: detected from the first bytes of the files, then from their suffix.
    sample : str. What a sample is. None: what the format says, in most of them a row of the arrays or of the table.
        "file": all rows of a file are one sample; a field has one array for each file, dense if their shapes agree,
        else ragged. "group", of HDF5: each group with arrays of its own is one sample. "particle" or "iteration", of
        openPMD.
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
        have fields, numbers, ``+ - * / // % **``, comparisons, ``& | ~`` and functions of NumPy (``log``, ``where``).
        A name that is no Python identifier stands in backticks: ``"`jet pt` > 30"``. Of ragged fields
        ``"Jet_pt > 30"`` has as many elements; ``sum``, ``count``, ``min``, ``max``, ``mean``, ``any`` and ``all`` make
        one number for each sample, of fields with a shape as well. ``Jet_pt[0]`` is the first element, missing if there
        is none, ``Jet_pt[Jet_eta < 2.5]`` those for which a condition is true, and ``nan`` a missing number. Texts and
        categories are compared with texts. The fields are like others, for inputs, targets, ``where``, other derived
        fields and splits; patterns of ``inputs`` do not stand for them.
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
    patch : int, or sequence of int, such as (256, 256). Each sample is a part of this extent of the first axes of an
        image or volume; None stands for a whole axis. Of uncompressed and chunked arrays only these bytes and chunks
        are read. Fields with fewer axes are repeated. ``split`` keeps the patches of an image in one set.
    patches_per_image : int. Number of random patches of each image, drawn anew in each epoch, the same on any number of
        ranks. None: a grid of all of the image, of which the last patch of an axis ends with the axis.
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
        file, and rank 0 warns once. None: the coordinate of the sample dimension of netCDF files and Zarr stores;
        windows of other formats end with their file.
    io : "collective": all ranks make every read together. "independent": each rank reads on its own. "auto":
        collective for up to 64 files of a parallel file system (Lustre, GPFS, BeeGFS, OrangeFS), or where the variable
        MATEX_IO_HINTS is set; otherwise independent.
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
    missing : treatment of missing numbers, which are NaN, also those of a field that a file lacks. "nan": keep them. A
        number: replace them by it. "mask": replace them by 0; the field ``<name>_mask`` is True for all other numbers.
        "drop": leave out samples with any, and those with missing texts, which are empty, or codes of no category,
        which are -1; this takes one read of the data when it is opened. A dict by field or pattern, ``{"age": "mean",
        "sex": "mode", "name": "unknown", "*": 0}``: numbers, the mean, "median", the most frequent value of numbers,
        texts or categories, another text for texts, or "nan" to keep them. Means, medians and modes are those of all
        samples, and after ``split`` or ``kfold`` those of the first set, which all sets get. Elements of ragged fields
        stay NaN, unless ``pad`` makes these dense.
    missing_values : number, list of numbers, or dict of these by field or pattern: -9999, ``{"station": [-1, 999]}``.
        Numbers of the files that stand for missing ones, and are NaN for all other options. Without names, those of all
        fields of floats; integers that are named become float64.
    absent : dict of number, bool or text by field name, such as ``{"gmd": nan, "genWeight": 1}``: the value of the
        field in the files that lack it, in all of them if need be. Integers stay integers, if the value is one. None:
        a field that files lack is missing there, as ``missing`` treats it.
    on_error : treatment of samples that cannot be read: damaged chunks and images, rows that do not parse. "raise": all
        ranks raise the error. "skip": leave them out of their batches, which become smaller (with ``remainder="pad"``,
        padding of sample weight 0 replaces them). The number of steps stays. Rank 0 warns at the end of each epoch, and
        ``Dataset.skipped`` lists them. Errors in the metadata of a file, and files that have changed when an epoch
        begins, are raised in any case, and so is an epoch of which no sample can be read.
    index : str or path. File in which the index of the files is stored, for data sets of many files: the first job
        writes it, and later ones only compare the sizes and times of the files with it, each rank of its share. Files
        that have changed are indexed anew, with a warning. Fields that splits and counts look at beside those of the
        batches are stored next to it, as ``events.matex.label``. Only the files of the data set are compared, not those
        that they refer to (external and virtual datasets of HDF5).
    trusted : str, path, or list of these. Folders and URLs, ``["/sdf/data", "s3://bucket/runs"]``, to which files may
        lead, with all that lies below them: by external raw data of HDF5, references of kerchunk and Icechunk, names of
        arrays in Zarr, URLs in tables of images. Without it, files may lead to the tree of their own folder, to folders
        among ``paths``, and HDF5 to other local HDF5 files; all else is an error before anything is asked for.
        Symbolic links count as what they lead to. Hosts are named one by one, with their port. The variable
        ``MATEX_TRUSTED`` names more, separated by commas, for all data sets of a site.
    options : options of the format's reader. ``dtype={"species": "category"}`` is one of every format: the field has
        codes, int32, which are positions in the sorted values of all samples, and -1 for missing ones; the attribute
        ``categories`` of the field lists the values.

    Notes
    -----
    The options apply in the order ``patch``, ``missing_values``, ``file_fields``, ``derive``, ``where``, ``flatten``,
    ``pad``, ``missing`` by field, ``one_hot``, ``stack``, ``window``, ``missing`` of all fields.

    Returns
    -------
    Dataset of the samples of all files, in the order of the files.

    Raises
    ------
    FieldNotFound : a field does not exist.
    FormatError : a file is damaged or of another format, or fields of the files cannot be united.
    DataError : a file does not exist, cannot be read, or leads to another one that is not trusted.
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
    arguments = dict(locals())
    sessions = read_sessions(comm)
    request, how = sessions.comm.agreed(lambda: _requested(arguments), equal_on_all(arguments))
    if sessions.comm.size > 1:
        refuse_own_rows()
    if not sessions.threaded:
        text = "each rank reads independently, and an error of one rank does not stop the others"
        sessions.comm.on_root(lambda: warn(f"MPI does not allow calls from threads: {text}"))
    given = Given.of(sessions.comm, arguments)
    how = how if given.memory is None else replace(how, io="independent")
    options = options if sample is None else {**options, SAMPLE: sample}
    request, reading = _prepare(
        sessions.comm,
        given,
        request,
        Reading(format, None, options, False, given.memory, given.trust, given.roots, absent or {}),
    )
    stored = None if index is None else os.fspath(index)
    reading = replace(reading, patches=request.patches)
    found = index_files(sessions.comm, given.files, reading, stored)
    if request.patches is not None:  # further fields, without an image, have as many
        reading = replace(reading, patches=replace(request.patches, count=int(found.facts[COUNT])))
    # The ranks of a machine have the paths of the index once.
    files: Sequence[str] = found.files.paths if given.files == found.files.paths else given.files
    if len(files) >= MANY_FILES:
        return_freed_memory()  # of the entries from which the columns were made
    opened = partial(open_source, sessions, options=how)
    selecting = next((name for name in ("sel", "iterations") if options.get(name) is not None), "")
    made, elements, samples, imputation = assemble(request, found, reading.names, selecting, opened)
    share_facts(sessions.comm, made.index.files)
    samples = samples or Runs.between(0, len(made.index))
    source = open_source(sessions, made.index, how, made.identity)
    if imputation is not None:
        source = imputation.fitted(source, samples)
        imputation = imputation if imputation.learns else None
    rows = found.files.rows
    further = FurtherFields(sessions.comm, files, reading, request.created, rows, opened, made.reshape, stored)
    if request.window is None and request.patches is None:
        further.warn_of_order(made.index)
    return Dataset(Selected(source, elements, samples, made.ties, further.open, imputation=imputation))


def _requested(arguments: Mapping[str, Any]) -> tuple[SampleOptions, ReadOptions]:
    """Return the options of the samples, and how they are read; raise ``DataError`` if they are no such options."""
    check_arguments(open_dataset, arguments)
    return SampleOptions.of(arguments), taken(ReadOptions, arguments)


def _prepare(
    comm: Communicator, given: Given, request: SampleOptions, reading: Reading
) -> tuple[SampleOptions, Reading]:
    """Return the request with its categories and weights, and how the files are read for it. *Collective*.

    Parameters
    ----------
    comm : the ranks.
    given : the files.
    request : options of the samples.
    reading : with the options of the reader, as the user gave them.

    Raises
    ------
    FormatError : an expression is not understood; a new field has the name of a field of the files.
    DataError : a file cannot be read.
    """
    options = dict(reading.options)
    if request.static_as_inputs:
        options["static_as_inputs"] = True
    categories, others = without_categories(options)
    if categories and (given.memory is not None or _makes_no_categories(comm, given.files[0], reading.format, options)):
        request, options = replace(request, categories=tuple(categories)), others
    reading = replace(reading, options=options)
    is_field = cache(partial(is_known, comm, given.files, reading))
    elements, created = with_weights(request.elements, request.created, is_field)
    request = replace(request, elements=elements, created=created).with_paths(is_field)
    files = len(given.files)
    names, spans = request.names(files, is_field), request.spans(files)
    reading = replace(reading, names=names, coordinate=spans and request.along is None)
    refuse_hidden(given.files[0], names, request.created, is_field)
    return request, reading


def _makes_no_categories(comm: Communicator, path: str, format: str | None, options: dict[str, Any]) -> bool:
    """Return whether the reader of a file knows no vocabularies, which are then made here. *Collective*."""
    return resolve_format(comm, path, format, options) not in WITH_CATEGORIES
