"""Mean, standard deviation, range and missing values of fields, in one collective read, merged by a stable formula."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from matex_data._types import Array, Integers
from matex_data.display import table_html
from matex_data.errors import FormatError
from matex_data.fields import Field, field_of, is_category, is_mask
from matex_data.index.runs import Samples
from matex_data.machine import check_fits
from matex_data.reading.plan import Arrays
from matex_data.reading.source import Source
from matex_data.transforms.counts import as_value, check_number
from matex_data.transforms.missing import is_missing
from matex_data.transforms.names import field_of_values
from matex_data.transforms.pad import dense_samples
from matex_data.words import shortened

Floats = NDArray[np.float64]
MOMENTS = 6  # arrays of the moments of a field
FEWER = "keep fewer axes with axis=, or group by a field of fewer values"
TILE = 1 << 18  # numbers summed at once: their float64 copies stay in the processor's cache


@dataclass(frozen=True)
class Moments:
    """Moments of the values of a field. Arrays have the shape of the axes that ``axis=`` keeps, else ().

    Parameters
    ----------
    count, missing : int64, number of present and of missing (NaN) values.
    mean : float64; 0 without any value.
    deviations : float64, sum of the squared deviations from the mean.
    min, max : float64; NaN without any value.
    counts : int64[categories], frequency of each category; None for fields that are not categorical.
    """

    count: NDArray[np.int64]
    missing: NDArray[np.int64]
    mean: Floats
    deviations: Floats
    min: Floats
    max: Floats
    counts: NDArray[np.int64] | None = None

    @property
    def variance(self) -> Floats:
        """Variance of the population, float64."""
        return np.divide(self.deviations, self.count, out=np.full_like(self.mean, np.nan), where=self.count > 0)

    @property
    def std(self) -> Floats:
        """Standard deviation of the population, float64."""
        return np.sqrt(self.variance)

    @np.errstate(over="ignore", invalid="ignore")  # of infinite numbers, the mean is infinite or NaN
    def merge(self, other: Moments) -> Moments:
        """Return the moments of both sets of values.

        Source: Chan, Golub and LeVeque, Updating Formulae (1979), equations 2.1a and 2.1b.
        """
        count = self.count + other.count
        weight = np.divide(other.count, count, out=np.zeros_like(self.mean), where=count > 0)
        gap = np.where(other.count > 0, other.mean, self.mean) - np.where(self.count > 0, self.mean, other.mean)
        mean = np.where(self.count > 0, self.mean, other.mean) + gap * weight
        deviations = self.deviations + other.deviations + gap**2 * self.count * weight
        counts = None if self.counts is None or other.counts is None else self.counts + other.counts
        return Moments(
            count,
            self.missing + other.missing,
            mean,
            deviations,
            np.fmin(self.min, other.min),
            np.fmax(self.max, other.max),
            counts,
        )


def layer_moments(moments: Moments) -> tuple[Floats, Floats]:
    """Return mean and variance for a layer that normalizes; the variance of values that do not vary is 1.

    Keras would divide by 1e-7: padding, say, at a position that one list alone reaches.
    """
    return moments.mean, np.where(moments.deviations > 0, moments.variance, 1.0)


_Groups = dict[Any, dict[str, Moments]]


class Statistics(Mapping[str, Moments]):
    """Moments by field name. For a single field they are also attributes: ``data.statistics("x").mean``."""

    def __init__(
        self,
        moments: Mapping[str, Moments],
        axis: tuple[int, ...] | None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self._moments = dict(moments)
        self._axis = axis
        self._shapes = shapes or {}  # of the samples of fields that are not ragged

    def __getitem__(self, name: str) -> Moments:
        return self._moments[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._moments)

    def __len__(self) -> int:
        return len(self._moments)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also while it is unpickled, without any attribute
            raise AttributeError(name)
        if len(self._moments) != 1:
            raise AttributeError(f"no attribute {name!r}; the fields are {', '.join(map(repr, self._moments))}")
        return getattr(next(iter(self._moments.values())), name)

    def __repr__(self) -> str:
        rows = [
            f"{name}: mean {m.mean}, std {m.std}, min {m.min}, max {m.max}, count {m.count}, missing {m.missing}"
            for name, m in self._moments.items()
        ]
        return "Statistics(\n  " + "\n  ".join(rows) + "\n)"

    def _repr_html_(self) -> str:
        columns = ("mean", "std", "min", "max", "count", "missing")
        rows = [[name, *(shortened(getattr(m, column)) for column in columns)] for name, m in self._moments.items()]
        return table_html(("field", *columns), rows)

    def normalization(self, field: str) -> Any:
        """Return the ``keras.layers.Normalization`` layer that gives the field mean 0 and variance 1."""
        from matex_data.epochs.tfdata import normalization

        return normalization(self._axis, *layer_moments(self[field]), self._shapes.get(field))


def statistics(source: Source, samples: Samples, names: Sequence[str], axis: int | Sequence[int] | None) -> Statistics:
    """Return the moments of fields. *Collective*.

    Parameters
    ----------
    source : the opened files.
    samples : samples of all ranks, ascending.
    names : field names; none: all numeric fields. Of a ragged field, all elements of the samples count.
    axis : axes of a batch to keep; None: none.

    Raises
    ------
    FieldNotFound, FormatError : see ``Dataset.statistics``.
    """
    (found,) = _by_group(source, samples, names, axis, None).values()
    return found


def statistics_by(
    source: Source, samples: Samples, names: Sequence[str], axis: int | Sequence[int] | None, by: str
) -> dict[Any, Statistics]:
    """Return the moments of fields for each value of another field, by value. *Collective*.

    Raises
    ------
    FieldNotFound, FormatError : see ``Dataset.statistics``.
    """
    problem = "statistics are grouped by a field with one value for each sample"
    field_of_values(source.index.raw.fields, by, problem)
    found = _by_group(source, samples, names, axis, by)
    return {value: found[value] for value in sorted(found)}


def _by_group(
    source: Source, samples: Samples, names: Sequence[str], axis: int | Sequence[int] | None, by: str | None
) -> dict[Any, Statistics]:
    """Return the moments of the samples with each value of a field, or of all by the value None. *Collective*."""
    schema, raw = source.index.fields, source.index.raw.fields
    others = [name for name, field in schema.items() if _numeric(field) and not is_mask(name, schema) and name != by]
    names = list(names) or others
    for name in names:
        _check(schema, name)
    kept = None if axis is None else tuple(np.ravel(axis).tolist())
    axes = {name: _kept_axes(schema[name], kept) for name in names}
    none = {name: _no_moments(raw[name], schema[name], axes[name]) for name in names}
    groups: dict[Any, dict[str, Moments]] = {} if by is not None else {None: none}
    nbytes = sum(MOMENTS * 8 * moments.mean.size for moments in none.values())

    @np.errstate(over="ignore", invalid="ignore")
    def add(_: Integers, arrays: Arrays) -> None:
        for value, rows in [(None, slice(None))] if by is None else _groups(raw[by], arrays[by]):
            of_group = groups.setdefault(value, none)
            found = {n: _moments(arrays[n][rows], raw[n], schema[n], axes[n]) for n in names}
            groups[value] = {n: reduce(Moments.merge, found[n], of_group[n]) for n in names}
        if by is not None:
            check_number(by, len(groups))
            check_fits(len(groups) * nbytes, "the statistics of all groups", remedy=FEWER, field=by)

    source.use_block(samples, names if by is None else [*dict.fromkeys([*names, by])], add)
    shapes = {name: schema[name].shape for name in names if not schema[name].ragged}
    merged = source.comm.combine(groups, partial(_merged, none))
    return {value: Statistics(moments, kept, shapes) for value, moments in merged.items()}


def _merged(none: dict[str, Moments], a: _Groups, b: _Groups) -> _Groups:
    """Return the moments of the groups of two ranks."""
    pairs = {value: (a.get(value, none), b.get(value, none)) for value in {**a, **b}}
    return {value: {name: one[name].merge(other[name]) for name in none} for value, (one, other) in pairs.items()}


def _groups(field: Field, values: Array) -> Iterator[tuple[Any, Any]]:
    """Yield each value of a field and the samples that have it, without those whose value is missing."""
    known = np.flatnonzero(~is_missing(values, field))
    different, inverse = np.unique(values[known], return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    edges = np.searchsorted(inverse[order], np.arange(len(different) + 1))
    for number, value in enumerate(different.tolist()):
        yield as_value(value), known[order[edges[number] : edges[number + 1]]]


def _numeric(field: Field) -> bool:
    return field.dtype.kind in "biuf" and not field.nested


def _check(schema: Mapping[str, Field], name: str) -> None:
    field_of(schema, name)
    if is_mask(name, schema):
        raise FormatError("a mask has no statistics", field=name, remedy="use the count of missing values of its field")
    if not _numeric(schema[name]):
        raise FormatError(
            "the field has no numbers, or lists of lists",
            field=name,
            expected="integers, floats or booleans, or lists of these",
            found=f"lists of {schema[name].description}" if schema[name].nested else schema[name].description,
            remedy="name fields of numbers; value_counts counts texts and categories",
        )


def _kept_axes(field: Field, axis: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the axes of a batch to keep, counted from 0."""
    rank = len(field.sample_shape) + 1
    least = rank - len(field.element_shape) if field.ragged else 1
    kept = tuple(sorted(a + rank if a < 0 else a for a in axis or ()))
    if any(not least <= a < rank for a in kept) or len(set(kept)) < len(kept):
        if axis == (-1,):  # a scalar field: its last axis is that of the samples
            return ()
        raise FormatError(
            "the field has no such axis, or it is named twice",
            field=field.name,
            expected=f"{least} to {rank - 1}" if rank > least else "no axis: the statistics are those of all elements",
            found=f"axis={axis}",
        )
    return kept


def _no_moments(raw: Field, field: Field, kept: tuple[int, ...]) -> Moments:
    shape = tuple(field.sample_shape[a - 1] or 0 for a in kept)
    zero, nan, none = np.zeros(shape, np.int64), np.full(shape, np.nan), np.empty(0, np.int64)
    return Moments(zero, zero, np.zeros(shape), np.zeros(shape), nan, nan, _counts(none, none == 0, raw))


def _counts(values: NDArray[Any], present: Array, field: Field) -> NDArray[np.int64] | None:
    if not is_category(field):
        return None
    return np.bincount(values[present], minlength=len(field.attributes["categories"])).astype(np.int64)


def _moments(array: NDArray[Any], raw: Field, field: Field, kept: tuple[int, ...]) -> Iterator[Moments]:
    """Yield the moments of an array, some rows at a time.

    Those of lists are of the elements of all samples, those of classes that are delivered as vectors of the vectors.

    Parameters
    ----------
    array : rows of the field as ``Index.raw`` has it.
    raw, field : the field there, and as it is delivered.
    kept : axes of the delivered field to keep.
    """
    filled: Array | None = None
    vectors = field.shape[-1] if is_category(raw) and not is_category(field) else 0
    if raw.ragged and kept and not field.ragged:
        array, filled = _dense(array.reshape(-1), raw, field)
    elif raw.ragged:
        array = raw.join(array.reshape(-1))
        kept = tuple(a - len(field.sample_shape) + len(field.element_shape) for a in kept)
    step = max(1, TILE // max(1, array[:1].size))
    others = tuple(a for a in range(array.ndim + bool(vectors)) if a not in kept)
    for begin in range(0, len(array), step):
        rows = array[begin : begin + step]
        missing = is_missing(rows, raw)
        if filled is not None:
            missing &= filled[begin : begin + step]
        present = ~missing if filled is None else filled[begin : begin + step] & ~missing
        counts = _counts(rows, present, raw)
        if vectors:
            rows = rows[..., None] == np.arange(vectors)
            present, missing = np.ones(rows.shape, bool), np.zeros(rows.shape, bool)
        values = rows.astype(np.float64)
        count = present.sum(axis=others)
        mean = values.sum(axis=others, where=present) / np.maximum(count, 1)
        deviations = np.square(values - np.expand_dims(mean, others)).sum(axis=others, where=present)
        low = np.min(values, axis=others, where=present, initial=np.inf)
        high = np.max(values, axis=others, where=present, initial=-np.inf)
        yield Moments(
            np.asarray(count, np.int64),
            np.asarray(missing.sum(axis=others), np.int64),
            np.asarray(mean),
            np.asarray(deviations),
            np.where(count > 0, low, np.nan),
            np.where(count > 0, high, np.nan),
            counts,
        )


def _dense(lists: Array, raw: Field, field: Field) -> tuple[Array, Array]:
    """Return lists as the dense samples that are delivered, and where these have elements, to be broadcast."""
    length = field.shape[len(raw.shape)]
    counts = np.fromiter(map(len, lists), np.int64, len(lists))
    dense, filled = dense_samples(raw.join(lists), counts, length)
    shape = (-1, *raw.shape, length, *(1,) * len(raw.element_shape))
    return dense.reshape(-1, *field.shape), filled.reshape(shape)
