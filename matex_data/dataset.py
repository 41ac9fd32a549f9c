"""``Dataset``: samples of one or more files, and the access to them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from matex_data._types import Remainder
from matex_data.arguments import check_arguments
from matex_data.batching import Batching, Shuffle
from matex_data.display import FieldTable, dataset_html, described_layout, draw_samples, save_picture
from matex_data.epochs.batches import Batches
from matex_data.epochs.costs import EpochCosts
from matex_data.errors import DataError
from matex_data.fields import Names, Schema, as_list, mapped_elements
from matex_data.index.computed import ComputedFields, compute_all
from matex_data.io.counters import Profile
from matex_data.locks import cached_property
from matex_data.reading.functions import Declared, SampleFunction
from matex_data.reading.samples import SampleReader, batch_of, positions_of, sample_of
from matex_data.reading.skipping import SkippedSample
from matex_data.sampling.sizing import ShuffleQuality
from matex_data.sampling.state import State
from matex_data.transforms.adapting import adapt
from matex_data.transforms.categories import count_as_classes
from matex_data.transforms.chained import Selected
from matex_data.transforms.counts import class_weights, value_counts
from matex_data.transforms.joining import is_in_memory
from matex_data.transforms.new_fields import Derive
from matex_data.transforms.pad import Keep, Pad
from matex_data.transforms.sequences import sequence_shape
from matex_data.transforms.splits import SplitOptions
from matex_data.transforms.statistics import Statistics, statistics, statistics_by
from matex_data.warning import warn
from matex_data.words import counted

if TYPE_CHECKING:
    import tensorflow as tf
    from matplotlib.figure import Figure

PREVIEW_SAMPLES, PREVIEW_BYTES = 256, 16 << 20  # of a picture of the data set, at most


class Dataset:
    """Samples of one or more files, distributed over the ranks. Made by ``open_dataset``.

    Parameters
    ----------
    selected : the samples, their files, and the structure of the batches.

    Examples
    --------
    >>> data = md.open_dataset("events.h5", inputs="image", targets="label")
    >>> len(data)
    100
    >>> for x, y in data.batches(50):
    ...     print(x.shape, y.shape)
    (50, 8, 8) (50,)
    (50, 8, 8) (50,)
    """

    def __init__(self, selected: Selected) -> None:
        self._selected, self._batching = selected, Batching(selected)
        self._source, self._elements, self._samples = selected.source, selected.elements, selected.samples

    @property
    def schema(self) -> Schema:
        """Fields of a sample: mapping of str to ``Field``, whose shape is without the sample axis.

        Examples
        --------
        >>> image = md.open_dataset("events.h5").schema["image"]
        >>> image.shape, image.dtype
        ((8, 8), dtype('uint8'))
        """
        return FieldTable(self._source.index.fields)

    @property
    def static(self) -> Mapping[str, NDArray[Any]]:
        """Arrays of the files that belong to no sample, such as coordinate axes: mapping of str to ndarray.

        Examples
        --------
        >>> dict(md.open_dataset("events.h5").static)
        {}
        """
        return MappingProxyType(self._source.index.static)

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the files: tuple of str, in the order of their samples.

        Examples
        --------
        >>> md.open_dataset("events.h5").paths
        ('events.h5',)
        """
        return tuple(self._source.index.sources.paths)

    @property
    def ranks(self) -> int:
        """Number of ranks that share the samples: int.

        Examples
        --------
        >>> md.open_dataset("events.h5").ranks
        1
        """
        return int(self._source.comm.size)

    def __len__(self) -> int:
        """Return the number of samples over all files and ranks."""
        return self._samples.total

    def __repr__(self) -> str:
        fields = ", ".join(f"{f.name}: {f.dtype_name}{list(f.sample_shape)}" for f in self.schema.values())
        return f"Dataset({counted(len(self), 'sample')} {self._origin}; {fields})"

    def _repr_html_(self) -> str:
        index = self._source.index
        try:
            first = self._first(PREVIEW_SAMPLES)
        except DataError:  # a look at the schema needs no samples
            first = {}
        title = f"{counted(len(self), 'sample')} {self._origin}"
        return dataset_html(title, index.fields, len(self), first, described_layout(index))

    @property
    def _origin(self) -> str:
        paths = self._source.index.sources.paths
        return "in memory" if is_in_memory(self._source) else f"of {counted(len(paths), 'file')}"

    def _first(self, count: int) -> Mapping[str, NDArray[Any]]:
        """Return the first samples by field, at most some megabytes of them."""
        count = min(count, len(self), PREVIEW_BYTES // self._source.row_bytes)
        return self._reader.take(np.arange(count)) if count > 0 else {}

    def __getitem__(self, key: int | slice | Sequence[int] | NDArray[Any]) -> Any:
        """Read samples by their positions. Each rank reads on its own, any samples of the data set.

        For an epoch take ``batches``: it reads ahead, and each rank its share. Samples that are near to one another
        read faster than scattered ones; files stay open, and decoded chunks in memory, for the next call.

        Parameters
        ----------
        key : int: one sample. Slice, sequence of int, or of bool with one for each sample: a batch, in this order.
            Negative numbers count from the end.

        Returns
        -------
        An element as of ``batches``, with NumPy arrays; of one sample without the sample axis.

        Raises
        ------
        IndexError : a position is out of range.
        DataError : a sample cannot be read, also with ``on_error="skip"``.

        Examples
        --------
        >>> data = md.open_dataset("events.h5", inputs="image", targets="label")
        >>> x, y = data[-1]
        >>> x.shape, int(y)
        ((8, 8), 9)
        >>> x, y = data[[3, 5, 3]]
        >>> x.shape, y.tolist()
        ((3, 8, 8), [3, 5, 3])
        """
        positions, single = positions_of(key, len(self))
        arrays = self._reader.take(positions)
        return sample_of(self._elements, arrays, 0) if single else batch_of(self._elements, arrays)

    def __iter__(self) -> Iterator[Any]:
        """Yield all samples in order. Each rank reads all of them on its own, some megabytes at a time.

        With ``on_error="skip"``, samples that cannot be read are left out.

        Examples
        --------
        >>> data = md.open_dataset("events.h5", inputs="image", targets="label")
        >>> sum(int(y) for x, y in data)
        450
        """
        for arrays in self._reader.windows():
            for row in range(len(next(iter(arrays.values())))):
                yield sample_of(self._elements, arrays, row)

    def head(self, n: int = 5) -> Any:
        """Read the first samples, as ``data[:n]`` does.

        Parameters
        ----------
        n : int of 0 or more. Number of samples.

        Examples
        --------
        >>> md.open_dataset("events.h5", inputs="label").head(3)
        array([0, 1, 2])
        """
        check_arguments(Dataset.head, locals())
        return self[: max(0, n)]

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw the first samples: images, curves of vectors, histograms of numbers. Each rank draws on its own.

        Parameters
        ----------
        path : file of the picture, such as "samples.png". None: no file.

        Returns
        -------
        ``matplotlib.figure.Figure``, which a notebook shows.

        Raises
        ------
        DataError : matplotlib is not installed, a sample cannot be read, there is none, or the file cannot be written.

        Examples
        --------
        >>> figure = md.open_dataset("events.h5").plot("samples.png")
        """
        check_arguments(Dataset.plot, locals())
        figure = draw_samples(self.schema, self._first(PREVIEW_SAMPLES))
        if path is not None:
            save_picture(figure, path)
        return figure

    @cached_property
    def _reader(self) -> SampleReader:
        return SampleReader(self._source, self._samples)

    def split(
        self,
        *fractions: float,
        seed: int | None = None,
        gap: int | None = None,
        stratify: str | None = None,
        groups: str | None = None,
        at: Sequence[Any] | None = None,
        along: str | None = None,
    ) -> tuple[Dataset, ...]:
        """Split the samples into disjoint data sets, equal for every number of ranks.

        *Collective* with ``stratify``, ``groups`` or ``at``, for which each rank reads one field of its block, and with
        ``missing={"age": "mean"}`` of ``open_dataset``: all sets then get the mean of the first one.

        Windows of consecutive rows (``window=`` of ``open_dataset``) that lie close together share rows. Where a set
        ends and another one begins in the same series, such windows in front of the border are left out, so that no row
        is in two sets. With a seed, windows are drawn in sections of neighbours, each ten gaps long or longer. The
        objects of an event (``flatten=``) stay in one set.

        Parameters
        ----------
        fractions : float, each from 0 to 1. Fractions of the samples; their sum is 1.
        seed : int of 0 or more. Seed of a random split. None: consecutive samples in the order of the files.
        gap : int of 0 or more. Number of samples to leave out in front of each border between two sets, whatever their
            files. None: as many windows as share rows with those behind the border; no other samples.
        stratify : str. Field of classes, of which each set gets its fraction, to one sample. Without a seed these are
            consecutive samples of the class.
        groups : str. Field whose equal values, such as a patient's, stay in one set. Sets have about their fractions of
            the samples: to half of a group, if groups are small. Without a seed the largest groups are assigned first,
            which gives the most even sets.
        at : list of numbers, or of dates: text ("2015-01-01"), datetime, ``numpy.datetime64`` or ``pandas.Timestamp``.
            Borders of the sets, in place of fractions: the first set is below the first border, the second one begins
            at it. Windows belong to the set of their first row.
        along : str. Field of numbers, times or dates that ``at`` compares. None: the coordinate of the sample dimension
            of netCDF files.

        ``stratify``, ``groups`` and ``along`` may name fields of the files that batches do not have.

        Returns
        -------
        One ``Dataset`` for each fraction, or one more than borders.

        Raises
        ------
        PartitionError : a fraction is negative, or their sum is not 1; the seed or the gap is no integer of 0 or more;
            the gaps leave nothing of a set; the borders do not ascend; options exclude each other.
        FieldNotFound : a field does not exist.
        FormatError : a field has no value for each sample.
        DataError : the first error of any rank, on every rank.

        Examples
        --------
        >>> data = md.open_dataset("events.h5", inputs="image", targets="label")
        >>> train, valid = data.split(0.9, 0.1, seed=1)
        >>> len(train), len(valid)
        (90, 10)
        >>> train, valid = data.split(0.8, 0.2, seed=1, stratify="label")
        >>> valid.value_counts("label")[3]
        2
        >>> [len(part) for part in data.split(at=[4, 9], along="label")]
        [40, 50, 10]
        >>> windows = md.open_dataset("events.h5", inputs="energy", window=8, horizon=2)
        >>> [len(part) for part in (windows, *windows.split(0.5, 0.5))]
        [91, 37, 45]
        """
        check_arguments(Dataset.split, locals())
        options = SplitOptions(seed, gap, stratify, groups, at, along)
        return tuple(map(Dataset, self._selected.split(fractions, options)))

    def kfold(
        self,
        number: int,
        *,
        seed: int | None = None,
        gap: int | None = None,
        stratify: str | None = None,
        groups: str | None = None,
    ) -> tuple[tuple[Dataset, Dataset], ...]:
        """Split the samples into folds, and return each of them behind the union of all others.

        *Collective* with ``stratify`` or ``groups``, and with means for missing values: those of the other folds.

        Parameters
        ----------
        number : int of 2 or more. Number of folds, of equal size to one sample; with ``groups`` about.
        seed, gap, stratify, groups : see ``split``.

        Returns
        -------
        Pairs (train, valid) of ``Dataset``, one for each fold.

        Raises
        ------
        PartitionError : a fold has no samples; see also ``split``.
        FieldNotFound, FormatError, DataError : see ``split``.

        Examples
        --------
        >>> pairs = md.open_dataset("events.h5").kfold(5, seed=1, stratify="label")
        >>> [(len(train), len(valid)) for train, valid in pairs]
        [(80, 20), (80, 20), (80, 20), (80, 20), (80, 20)]
        """
        check_arguments(Dataset.kfold, locals())
        options = SplitOptions(seed, gap, stratify, groups)
        pairs = self._selected.folds(number, options)
        return tuple((Dataset(training), Dataset(held_out)) for training, held_out in pairs)

    def map(
        self,
        function: Callable[..., Any],
        *,
        schema: Declared | None = None,
        fields: Sequence[str] | None = None,
        inputs: Names = None,
        targets: Names = None,
        seed: int = 0,
    ) -> Dataset:
        """Return a data set with fields that a function computes, a window of samples at a time. *Collective*.

        The function is called where windows are decoded, with the samples of a window, of one file or more, in threads
        of each rank, several at once. What it returns for a sample has to depend on this sample alone; then the batches
        are the same on every number of ranks, and after resuming. For random numbers it has a parameter ``seeds``:
        int64, a seed of each sample, drawn from ``seed``, the epoch and the sample. In ``statistics``, ``load``,
        ``data[i]`` and the like, the epoch is 0.

        Parameters
        ----------
        function : callable. Gets a dict of field name to array (samples, *field shape), and returns a dict of arrays
            with as many samples; or one array, if it returns one field.
        schema : mapping of field name to (shape, dtype), to a dtype for one value per sample, or to a ``Field``. Fields
            that the function returns, new ones or in place of others; a shape without the samples, with None for axes
            that vary. None: those that it returns for the first sample, with which rank 0 calls it. A field that has
            name, shape, dtype and, there, values of one that the function gets keeps its attributes, such as units and
            categories.
        fields : sequence of str. Fields that the function gets. None: all.
        inputs, targets : str or list of str. Structure of the batches, as of ``open_dataset``. None for both: that of
            this data set, to whose inputs new fields are added. Fields that neither the batches nor the function need
            are not read.
        seed : int of 0 or more. Seed of the seeds.

        Returns
        -------
        Dataset of the same samples.

        Raises
        ------
        FieldNotFound : a field does not exist.
        FormatError : a declaration is not understood.
        FunctionError : from batches and other reads, on every rank: the function raises an error, or returns something
            else than is declared.

        Examples
        --------
        >>> data = md.open_dataset("events.h5", inputs="image", targets="label")
        >>> unit = {"image": ((8, 8), "float32")}
        >>> bright = data.map(lambda arrays: arrays["image"] / np.float32(255), schema=unit, fields=["image"])
        >>> x, y = next(iter(bright.batches(50)))
        >>> x.dtype, float(x.max())
        (dtype('float32'), 1.0)
        >>> def flip(arrays, seeds):
        ...     left = seeds % 2 == 0
        ...     image = np.where(left[:, None, None], arrays["image"][:, :, ::-1], arrays["image"])
        ...     return {**arrays, "image": image}
        >>> flipped = data.map(flip, seed=1)
        >>> x, y = next(iter(flipped.batches(50, shuffle=True, seed=2)))
        """
        check_arguments(Dataset.map, locals())
        source = self._source
        computes = SampleFunction.of(function, self.schema, fields, schema, seed)
        if schema is None and len(self):
            computes = replace(computes, fields=source.comm.on_root(lambda: self._returned_fields(computes)))
        known = {**self.schema, **computes.fields}
        elements = mapped_elements(self._elements, self.schema, known, inputs, targets)
        if not computes.fields.keys() & set(elements.required or computes.fields) and source.comm.rank == 0:
            warn(f"map adds the fields {', '.join(computes.fields)}, of which none is among the inputs and targets")
        draws = computes.seeds_as is not None
        step = ComputedFields(computes.compute, list(computes.given), computes.fields, draws=draws)
        index = compute_all(source.index, [step])
        index = count_as_classes(index, computes.fields)
        return Dataset(self._selected.with_fields(index, elements, f"map {computes.name} {computes.seed}"))

    def _of_rank(self, rank: int, ranks: int) -> Dataset:
        """Return the data set as one rank of others, to which MPI does not connect this process."""
        return Dataset(replace(self._selected, source=self._source.alone(rank, ranks)))

    def _returned_fields(self, function: SampleFunction) -> Schema:
        """Return the fields that a function returns for the first sample, which this rank reads."""
        source = self._source.alone()
        reader = SampleReader(source.of_index(source.index.select(list(function.given)), ""), self._samples)
        return function.returned_fields(reader.take(np.zeros(1, np.int64)))

    def derive(self, expressions: Derive, *, inputs: Names = None, targets: Names = None) -> Dataset:
        """Return a data set with fields that are made of others by expressions. *Collective*.

        Parameters
        ----------
        expressions : dict of field name to expression of fields of this data set, as ``derive=`` of ``open_dataset``.
        inputs, targets : str or list of str. Structure of the batches; see ``map``.

        Returns
        -------
        Dataset of the same samples.

        Raises
        ------
        FieldNotFound : an expression names no field of the data set.
        FormatError : an expression cannot be evaluated; the data set already has a field of this name.

        Examples
        --------
        >>> data = md.open_dataset("events.h5", inputs="image", targets="energy")
        >>> high = data.derive({"high": "energy > 5"}, inputs="image", targets="high")
        >>> x, y = next(iter(high.batches(10)))
        >>> y.dtype
        dtype('bool')
        """
        check_arguments(Dataset.derive, locals())
        return Dataset(self._selected.derive(expressions, inputs, targets))

    def where(self, condition: str) -> Dataset:
        """Return the samples for which an expression of their fields is true. *Collective*.

        Parameters
        ----------
        condition : str. Expression of fields of this data set, as ``where=`` of ``open_dataset``. Each rank reads
            these fields of its block of the samples.

        Raises
        ------
        FieldNotFound : the expression names no field of the data set.
        FormatError : it cannot be evaluated, or has no truth value for each sample.
        DataError : the first error of any rank, on every rank.

        Examples
        --------
        >>> len(md.open_dataset("events.h5").where("label < 3"))
        30
        """
        check_arguments(Dataset.where, locals())
        return Dataset(self._selected.where(condition))

    def pad(self, lengths: Pad, *, keep: Keep = "first", inputs: Names = None, targets: Names = None) -> Dataset:
        """Return a data set whose ragged fields are dense: zeros behind, surplus elements cut off. *Collective*.

        Parameters
        ----------
        lengths : dict of field name or pattern to int, the length of each sample.
        keep : rule by which elements are kept if there are more, as of ``open_dataset``.
        inputs, targets : str or list of str. Structure of the batches, which may name masks, ``<name>_mask``. None for
            both: that of this data set, without masks if it names its fields.

        Returns
        -------
        Dataset of the same samples.

        Raises
        ------
        FieldNotFound : a name is no ragged field of the data set.
        FormatError : the elements are not of fixed size.
        PartitionError : a length is below 1.

        Examples
        --------
        >>> jets = md.open_dataset({"pt": [np.arange(n, dtype=float) for n in (2, 0, 5)]})
        >>> jets.pad({"pt": 3}).head()["pt"].tolist()
        [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 1.0, 2.0]]
        """
        check_arguments(Dataset.pad, locals())
        return Dataset(self._selected.pad(lengths, keep, inputs, targets))

    def flatten(self, fields: str | Sequence[str]) -> Dataset:
        """Return a data set whose samples are the elements of ragged fields, such as the jets of events. *Collective*.

        Parameters
        ----------
        fields : str or list of str. Names and patterns of ragged fields of equal lengths; the other fields are those of
            the event. Each rank reads the lengths of its block of the samples.

        Raises
        ------
        FieldNotFound : a name is no ragged field of the data set.
        PartitionError : samples are windows or objects already, or those of a mixture.
        DataError : the first error of any rank, on every rank.

        Examples
        --------
        >>> jets = md.open_dataset({"pt": [np.arange(n, dtype=float) for n in (2, 0, 5)], "run": [1, 2, 3]})
        >>> jets.flatten("pt").head(9)["run"].tolist()
        [1, 1, 3, 3, 3, 3, 3]
        """
        check_arguments(Dataset.flatten, locals())
        return Dataset(self._selected.flatten(as_list(fields)))

    def window(
        self, window: int, *, stride: int = 1, lead: int = 1, horizon: int | None = None, along: str | None = None
    ) -> Dataset:
        """Return a data set whose samples are windows of consecutive rows of a file, for forecasting. *Collective*.

        After ``split`` or ``where``, those windows remain of which all rows, and all rows of the target, are samples.

        Parameters
        ----------
        window, stride, lead, horizon : int. Rows of a window, from window to window, from the last row of the window to
            the first one of the target, and of the target, as of ``open_dataset``.
        along : str. Field of this data set by which one file continues another. None: the coordinate of the samples of
            netCDF files, if the data set has it; else no window reaches from one file into the next.

        Raises
        ------
        FormatError : no file is long enough for a window; a field has samples of varying length.
        PartitionError : an extent is too small; samples are windows or objects already, have weights, or are those of a
            mixture; no window has its rows among the samples.

        Examples
        --------
        >>> series = md.open_dataset("events.h5", inputs="energy")
        >>> x, y = next(iter(series.window(24, horizon=6).batches(10)))
        >>> x.shape, y.shape
        ((10, 24), (10, 6))
        >>> train, valid = series.split(0.5, 0.5)
        >>> len(train.window(24, horizon=6))
        21
        """
        check_arguments(Dataset.window, locals())
        shape = sequence_shape(window, stride, horizon, lead, self._elements.targets)
        return Dataset(self._selected.window(shape, along))

    def adapt(self, layer: Any, field: str | None = None) -> None:
        """Adapt a preprocessing layer of Keras to all samples, equally on all ranks. *Collective*.

        ``Normalization`` gets the mean and the variance of all samples without missing values, of which each rank reads
        its block. For other layers, and for ``keras.utils.FeatureSpace``, each rank reads all samples, as one process.

        Parameters
        ----------
        layer : layer with a method ``adapt``, or ``keras.utils.FeatureSpace``, which gets a dict of all inputs.
        field : str. Field that the layer gets, which may be one of the files that batches do not have. None: the input
            of the data set, which then has to be one.

        Raises
        ------
        FieldNotFound : the field does not exist.
        FormatError : the field has no numbers, for ``Normalization``; the data set has more than one input.
        DataError : the first error of any rank, on every rank.

        Examples
        --------
        >>> import keras
        >>> data = md.open_dataset("events.h5", inputs="energy", targets="label")
        >>> layer = keras.layers.Normalization(axis=None)
        >>> data.adapt(layer)
        >>> round(abs(float(np.mean(layer(data.load()["energy"])))), 3)
        0.0
        """
        check_arguments(Dataset.adapt, locals())
        adapt(layer, self._source, self._selected.source_of, self._elements, self._samples, field)

    def batches(
        self,
        batch_size: int,
        *,
        shuffle: Shuffle = False,
        seed: int | None = None,
        remainder: Remainder = "drop",
        start: State | None = None,
    ) -> Batches:
        """Return an iterable over this rank's rows of every global batch, as NumPy arrays. *Collective*.

        Each iteration is one epoch. Iterate again for the next epoch, in its own order.

        Parameters
        ----------
        batch_size : int, in samples. Size of a global batch, over all ranks; a multiple of the number of ranks.
        shuffle : bool or "global". True: a new order in every epoch, of blocks over all data, and of samples within a
            window; see ``shuffle_quality``. "global": a uniform permutation of all samples in every epoch; see
            ``global_reads`` of ``open_dataset``. False: the order of the files.
        seed : int of 0 or more. Determines the order of all epochs. None: drawn on rank 0.
        remainder : treatment of the samples that do not fill a batch. "drop": leave them out of the epoch, which has to
            have a batch. "pad": fill
            the batch with zeros of sample weight 0. "keep": a smaller batch, which may be empty on some ranks.
        start : result of ``state``, equal on all ranks. Resume there, with its seed unless ``seed`` is given.

        Returns
        -------
        Iterable of elements, whose arrays have the shape (batch_size / ranks, *field shape).

        Raises
        ------
        PartitionError : the number of ranks does not divide ``batch_size``; "drop" would leave no batch; the arguments
            differ between the ranks; ``start`` is the state of other samples, options or another order; the samples of
            a rank do not fit into its memory, where they have to.

        Examples
        --------
        >>> data = md.open_dataset("events.h5", inputs="image", targets="label")
        >>> batches = data.batches(40, shuffle=True, seed=1, remainder="keep")
        >>> [len(y) for x, y in batches]
        [40, 40, 20]
        """
        return self._batching.batches(batch_size, shuffle, seed, remainder, start)

    def tf_dataset(
        self,
        batch_size: int,
        *,
        shuffle: Shuffle = False,
        seed: int | None = None,
        remainder: Remainder = "drop",
        start: State | None = None,
    ) -> tf.data.Dataset:
        """Return a ``tf.data.Dataset`` of this rank's rows of every global batch. *Collective*.

        Like ``batches``, but with tensors. The element spec is known to TensorFlow, and so is the cardinality, except
        after ``start`` in the middle of an epoch: the first epoch is then shorter than the others.

        Parameters
        ----------
        batch_size, shuffle, seed, remainder, start : see ``batches``.

        Returns
        -------
        tf.data.Dataset. Each iteration is one epoch.

        Raises
        ------
        PartitionError : see ``batches``.
        FormatError : a field has a dtype that TensorFlow does not have.

        Examples
        --------
        >>> data = md.open_dataset("events.h5", inputs="image", targets="label")
        >>> tensors = data.tf_dataset(40, shuffle=True, seed=1)
        >>> int(tensors.cardinality())
        2
        >>> [tuple(x.shape) for x, y in tensors]
        [(40, 8, 8), (40, 8, 8)]
        """
        from matex_data.epochs.tfdata import as_tf_dataset

        batches = self.batches(batch_size, shuffle=shuffle, seed=seed, remainder=remainder, start=start)
        return as_tf_dataset(batches, self.schema)

    def _matex_input_batches(self, rows: int) -> Iterator[tuple[tf.data.Dataset, int]]:
        """Yield the inputs of this rank's block of the samples; see ``input_batches``. *Collective*."""
        from matex_data.epochs.tfdata import input_batches

        return input_batches(self._source, self._elements, self._samples, rows)

    def load(self, fields: Names = None) -> dict[str, NDArray[Any]]:
        """Read this rank's block of the samples, in the order of the files. *Collective*.

        Each rank gets other samples: what is computed from them, such as a vocabulary, the classes or a mean, differs
        between the ranks. For all samples take ``value_counts``, ``class_weights``, ``statistics`` or
        ``normalization``, whose results are equal on all ranks.

        Parameters
        ----------
        fields : sequence of str. Fields to read, also of the files, such as the ids of samples that batches do not
            have; the samples are those of ``training.predict``, in its order. None: the fields of the batches.

        Returns
        -------
        Dict of field name to ndarray of shape (samples of this rank, *field shape). With ``on_error="skip"``, samples
        that batches leave out are left out; a field that batches do not have is an error where it cannot be read.

        Raises
        ------
        FieldNotFound : a field does not exist.
        DataError : the first error of any rank, on every rank.

        Examples
        --------
        >>> arrays = md.open_dataset("events.h5").load()
        >>> arrays["image"].shape
        (100, 8, 8)
        >>> md.open_dataset("events.h5", inputs="image").load(fields=["label"])["label"][:3]
        array([0, 1, 2])
        """
        check_arguments(Dataset.load, locals())
        return self._source.load(self._samples) if fields is None else self._selected.load(as_list(fields))

    @overload
    def statistics(self, *fields: str, axis: int | Sequence[int] | None = None) -> Statistics: ...

    @overload
    def statistics(self, *fields: str, axis: int | Sequence[int] | None = None, by: str) -> dict[Any, Statistics]: ...

    def statistics(
        self, *fields: str, axis: int | Sequence[int] | None = None, by: str | None = None
    ) -> Statistics | dict[Any, Statistics]:
        """Return count, missing values, mean, standard deviation, minimum and maximum of fields. *Collective*.

        Each rank reads its block of the samples once. Results do not depend on the number of ranks, up to rounding.
        Missing numbers are missing here, also if ``missing=`` replaces them, and padding does not count, but in stacks
        and in what ``map`` makes of it. With ``on_error="skip"``, samples that cannot be read are left out.

        Parameters
        ----------
        fields : str. Names of fields; none: all numeric fields.
        axis : int or sequence of int. Axes of a batch to keep, such as -1 for channels, as in
            ``keras.layers.Normalization``. None: one number for the whole field.
        by : str. Field of the data set with one value for each sample, such as "station", or expression of its fields,
            such as "month(time)", or "month" if one field has times: statistics of the samples with each value. None:
            of all samples.

        Returns
        -------
        Mapping of field name to ``Moments``. For a single field, also its attributes ``mean``, ``std``, ``min``,
        ``max``, ``count`` and ``missing``. With ``by``, a dict of these by value, ascending.

        Raises
        ------
        FieldNotFound : a field does not exist.
        FormatError : a field is not numeric, or does not have the axis.
        DataError : the first error of any rank, on every rank.

        Examples
        --------
        >>> label = md.open_dataset("events.h5").statistics("label")
        >>> print(label.count, label.min, label.max, label.mean)
        100 0.0 9.0 4.5
        >>> by_label = md.open_dataset("events.h5").statistics("energy", by="label")
        >>> len(by_label), int(by_label[3].count)
        (10, 10)
        """
        check_arguments(Dataset.statistics, {"axis": axis, "by": by})
        if by is not None:
            grouped = self._selected.with_groups(by)
            return statistics_by(grouped.source, grouped.samples, fields, axis, by)
        return statistics(self._source, self._samples, fields, axis)

    def normalization(self, field: str, axis: int | Sequence[int] | None = -1) -> Any:
        """Return the ``keras.layers.Normalization`` layer that gives a field mean 0 and variance 1. *Collective*.

        Parameters
        ----------
        field : str. Name of a numeric field.
        axis : int or sequence of int. Axes of a batch with a mean and a variance of their own. None: one mean and one
            variance for the whole field.

        Raises
        ------
        FieldNotFound, FormatError, DataError : see ``statistics``.

        Examples
        --------
        >>> data = md.open_dataset("events.h5")
        >>> layer = data.normalization("energy", axis=None)
        >>> round(abs(float(np.mean(layer(data.load()["energy"])))), 3)
        0.0
        """
        return self.statistics(field, axis=axis).normalization(field)

    def value_counts(self, field: str) -> dict[Any, int]:
        """Return how often each value of a field occurs in all samples, equal on all ranks. *Collective*.

        Each rank reads its block of the samples once, and keeps the different values. Missing values (NaN, empty texts,
        codes of no category) do not count, missing numbers not even if ``missing=`` replaces them; nor does padding. Of
        one-hot vectors the codes of the classes count. With ``on_error="skip"``, samples that cannot be read are left
        out.

        Parameters
        ----------
        field : str. Name of a field of integers, booleans, floats or texts, which may be one of the files that batches
            do not have. Of arrays and lists, all elements count.

        Returns
        -------
        Dict of value (int, bool, float or str) to count, the most frequent first, equally frequent ones by value.

        Raises
        ------
        FieldNotFound : the field does not exist.
        FormatError : the field is of another type, or has more than a million different values.
        DataError : the first error of any rank, on every rank.

        Examples
        --------
        >>> md.open_dataset("events.h5", where="label < 3").value_counts("label")
        {0: 10, 1: 10, 2: 10}
        """
        return value_counts(*self._selected.source_of(field), self._samples)

    def vocabulary(self, field: str) -> dict[Any, int]:
        """Return the different values of a field in all samples with their counts, in the order of the values.

        Equal on all ranks. *Collective*.

        Parameters
        ----------
        field : str. Name of a field of integers, booleans, floats or texts; see ``value_counts``.

        Returns
        -------
        Dict of value (int, bool, float or str) to count; its keys are the vocabulary.

        Raises
        ------
        FieldNotFound, FormatError, DataError : see ``value_counts``.

        Examples
        --------
        >>> list(md.open_dataset("events.h5").vocabulary("label"))
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
        """
        return dict(sorted(self.value_counts(field).items()))

    def class_weights(self, field: str) -> dict[Any, float]:
        """Return the weight of each class that gives all classes the same sum, for Keras's ``class_weight``.

        The weight is samples / (classes * samples of the class), as "balanced" in scikit-learn. *Collective*.

        Parameters
        ----------
        field : str. Name of the field of classes; see ``value_counts``.

        Returns
        -------
        Dict of value to weight, by value.

        Raises
        ------
        FieldNotFound, FormatError, DataError : see ``value_counts``.

        Examples
        --------
        >>> md.open_dataset("events.h5", where="label < 2").class_weights("label")
        {0: 1.0, 1: 1.0}
        """
        return class_weights(self.value_counts(field))

    @property
    def profile(self) -> Profile:
        """Counters of this rank: seconds of each stage, samples and bytes, shared by all data sets of a split.

        Examples
        --------
        >>> data = md.open_dataset("events.h5")
        >>> for batch in data.batches(50):
        ...     pass
        >>> data.profile.samples
        100
        """
        return self._source.profile

    @property
    def skipped(self) -> list[SkippedSample]:
        """Samples that could not be read so far, with ``on_error="skip"``: list of ``SkippedSample``.

        They are in the order of the files, each with its ``file``, ``row``, ``problem`` and ``field``. Those of other
        ranks are included from the end of an epoch, of ``load`` or of ``statistics`` on. Shared by all data sets of a
        split.

        Examples
        --------
        >>> data = md.open_dataset("events.h5", on_error="skip")
        >>> for batch in data.batches(50):
        ...     pass
        >>> data.skipped
        []
        """
        return [] if self._source.skipped is None else self._source.skipped.records

    def state(self, step: int) -> dict[str, Any]:
        """Return the state of a run after ``step`` global batches, to resume it with ``start=``.

        Give the state to ``tf_dataset`` or ``batches``, with the options of the run, on any number of ranks: the next
        batch is batch ``step``. The state holds the samples, and the options of the latest call of ``batches`` or
        ``tf_dataset`` with the seed, even if it was drawn; ``start=`` refuses any difference. Before the first such
        call, it holds the samples only.

        Parameters
        ----------
        step : int, in global batches. Counted from the first batch of epoch 0.

        Returns
        -------
        Dict of plain values, which can be stored as JSON.

        Raises
        ------
        PartitionError : batches of equal options were made with several seeds, one of them drawn, so that the state is
            ambiguous.

        Examples
        --------
        >>> data = md.open_dataset("events.h5", inputs="label")
        >>> first, second = data.batches(50, shuffle=True, seed=1)
        >>> resumed = data.batches(50, shuffle=True, start=data.state(1))
        >>> np.array_equal(next(iter(resumed)), second)
        True
        """
        check_arguments(Dataset.state, locals())
        return self._batching.state(step)

    def shuffle_quality(self, batch_size: int) -> ShuffleQuality:
        """Return how well ``shuffle=True`` mixes files that are sorted by class. No samples are read.

        Parameters
        ----------
        batch_size : int, in samples. Size of a global batch.

        Returns
        -------
        ``ShuffleQuality``. Its ``ratio`` is the standard deviation of the fraction of a class in a batch, divided by
        that of batches drawn from all samples uniformly; 1 is as good as a shuffle of all samples. The other figures,
        ``blocks_per_window`` above all, determine the ratio.

        Raises
        ------
        PartitionError : ``batch_size`` is below 1.

        Examples
        --------
        >>> md.open_dataset("events.h5").shuffle_quality(10).ratio < 1.1
        True
        """
        check_arguments(Dataset.shuffle_quality, locals())
        return self._batching.quality(batch_size)

    def read_plan(
        self,
        batch_size: int,
        *,
        ranks: int,
        shuffle: Shuffle = True,
        seed: int = 0,
        remainder: Remainder = "drop",
        ranks_per_node: int | None = None,
    ) -> EpochCosts:
        """Return what an epoch costs on any number of ranks: bytes, reads, opened files, memory. No samples are read.

        The figures come from the schedule and the reads of a real epoch, of all ranks in a small job, of a sample of
        them in a large one. Memory is assumed to allow reads of 64 MiB at once: 4 GiB free for each rank.

        Parameters
        ----------
        batch_size : int, in samples. Size of a global batch, over all ranks; a multiple of ``ranks``.
        ranks : int of 1 or more. Number of ranks of the job; independent of that of this process.
        shuffle, seed, remainder : see ``batches``.
        ranks_per_node : int of 1 or more. Number of ranks that share a machine, for the memory of a node.

        Returns
        -------
        ``EpochCosts``: ``amplification`` (bytes that all ranks read, divided by those needed), ``bytes_read``,
        ``reads_per_rank``, ``mean_read_bytes``, ``opens_per_rank``, ``lanes``, ``samples_mixed``, ``bytes_per_rank``
        and ``bytes_per_node`` of memory, ``messages_per_step``; and ``remedies``, what to change where one is bad.

        Raises
        ------
        PartitionError : the number of ranks does not divide ``batch_size``; an epoch has no batch; an argument is not
            valid.

        Examples
        --------
        >>> costs = md.open_dataset("events.h5").read_plan(40, ranks=4)
        >>> costs.steps, round(costs.amplification, 1), costs.remedies
        (2, 1.0, ())
        """
        check_arguments(Dataset.read_plan, locals())
        return self._batching.costs(batch_size, ranks, shuffle, seed, remainder, ranks_per_node)
