"""One data set out of several: ``concat``, ``merge`` and ``mix``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np

from matex_data.arguments import check_arguments
from matex_data.dataset import Dataset
from matex_data.errors import PartitionError
from matex_data.fields import ElementSpec, Names, as_list
from matex_data.index.model import Index
from matex_data.opening.indexing import share_facts
from matex_data.reading.source import Source
from matex_data.sampling.mixing import Mixture
from matex_data.sampling.permutation import check_seed
from matex_data.transforms.chained import Selected
from matex_data.transforms.joining import check_sources, is_in_memory, join_samples, join_sources, join_ties, named
from matex_data.transforms.merging import (
    ROWS,
    Coordinate,
    merge_indexes,
    merge_names,
    merge_ties,
    pair_rows,
    pair_samples,
)


def concat(datasets: Sequence[Dataset]) -> Dataset:
    """Return the samples of several data sets, one after the other, as one data set. *Collective*.

    The result is a ``Dataset`` like any other: it can be split, counted, normalized, shuffled and resumed.

    Parameters
    ----------
    datasets : sequence of ``Dataset``, with the same inputs and targets, of equal shapes and dtypes, which may be of
        different formats.

    Returns
    -------
    Dataset.

    Raises
    ------
    FormatError : the fields differ in name, shape, dtype, units or names of codes.
    PartitionError : the data sets differ in inputs, targets, ranks or options of reading; there is none.

    Examples
    --------
    >>> low = md.open_dataset("events.h5", inputs="image", targets="label", where="label < 2")
    >>> high = md.open_dataset("events.h5", inputs="image", targets="label", where="label > 7")
    >>> data = md.concat([low, high])
    >>> len(data), data.value_counts("label")
    (40, {0: 10, 1: 10, 8: 10, 9: 10})
    """
    check_arguments(concat, locals())
    sources = _sources(datasets)
    index = join_sources(sources)
    _check_elements(datasets, sources)
    totals = [len(source.index) for source in sources]
    first = np.cumsum([0, *totals])
    samples = join_samples([data._samples for data in datasets], first[:-1].tolist(), int(first[-1]))
    ties = join_ties([data._selected.ties for data in datasets], totals)
    share_facts(sources[0].comm, index.files)
    source = _opened(sources, index, "".join(source.transforms for source in sources))
    return Dataset(Selected(source, datasets[0]._elements, samples, ties, partial(_open_all, tuple(datasets))))


def merge(
    first: Dataset,
    second: Dataset,
    *,
    on: str | Sequence[str] | None = None,
    left_on: str | Sequence[str] | None = None,
    right_on: str | Sequence[str] | None = None,
    how: Literal["exact", "inner", "left", "rows"] = "exact",
) -> Dataset:
    """Return the fields of two data sets side by side, where keys are equal, or by position. *Collective*.

    For variables in folders of their own, such as those of a reanalysis, and for tables of labels or of conditions of
    a run. Each rank reads the keys of its block once; the other fields are read as those of one data set. For more than
    two, merge the result with the next one.

    Parameters
    ----------
    first, second : ``Dataset``, with different names of fields. Inputs and targets of the result are those of both:
        ``x`` of one and ``y`` of the other make ``(x, y)``. One of them may be in memory.
    on : str or list of str. Keys: fields of numbers or texts in the files of both, such as "time" or ["run", "event"],
        by which samples correspond; they need not be among the inputs. Times, by their units and calendar, are equal to
        a millisecond, integers of the same units as they are. Of windows, the first row counts.
    left_on, right_on : str or list of str. The keys of ``first`` and of ``second``, in place of ``on``.
    how : "exact": the values are equal in both data sets, in one order; anything else is an error. "inner": samples
        whose values the other data set does not have are left out; the order is that of ``first``. "left": all samples
        of ``first``; those without a counterpart have missing values, for which integers are float64. With these two,
        a missing key of ``first`` has no counterpart, samples of ``first`` may correspond to the same one of
        ``second``, and each rank has all keys of ``second`` in memory for a moment, 8 bytes for each number. "rows":
        without keys; the n-th samples belong together, as entries of friend trees of ROOT, and nothing is compared but
        the numbers of samples.

    Returns
    -------
    Dataset.

    Raises
    ------
    FieldNotFound : a data set does not have the field.
    FormatError : the values differ, are missing, or cannot be compared: texts with numbers, other numbers with float64
        beyond 2**53 or float32 beyond 2**24, times of two calendars; values occur twice in ``second``; both data sets
        have another field of one name.
    PartitionError : nothing is equal; the data sets differ in ranks or options of reading; both have weights.

    Examples
    --------
    >>> images = md.open_dataset("events.h5", inputs="image")
    >>> energies = md.open_dataset("events.h5", targets="energy", where="label > 7")
    >>> x, y = next(iter(md.merge(images, energies, on="energy", how="inner").batches(20)))
    >>> x.shape, y.shape
    ((20, 8, 8), (20,))
    >>> names = md.open_dataset({"class": np.arange(10), "is_even": np.arange(10) % 2 == 0}, inputs="is_even")
    >>> md.merge(images, names, left_on="label", right_on="class", how="left").head(2)["is_even"]
    array([ True, False])
    >>> scores = md.open_dataset({"score": np.arange(len(images)) / 4}, targets="score")
    >>> x, y = next(iter(md.merge(images, scores, how="rows").batches(3)))
    >>> x.shape, y.tolist()
    ((3, 8, 8), [0.0, 0.25, 0.5])
    """
    check_arguments(merge, locals())
    sources = _sources([first, second])
    _check_one_weight(first, second)
    left, right = _keys(on, left_on, right_on, how)
    if how == ROWS:
        pairs = pair_rows(sources[0], first._samples, second._samples)
    else:
        pairs = pair_samples(_coordinates(first, left), _coordinates(second, right), how)
    samples = first._samples if how == "left" else pairs.samples
    shared = [name for name, other in zip(left, right, strict=True) if name == other]
    index = merge_indexes(sources[0].index, sources[1].index, pairs, shared, samples)
    share_facts(sources[0].comm, index.files)
    transforms = "".join([*(source.transforms for source in sources), pairs.digest()])
    source = _opened(sources, index, transforms, next((s for s in sources if not is_in_memory(s)), sources[0]))
    ties = merge_ties(first._selected.ties, second._selected.ties, pairs, len(sources[0].index))
    return Dataset(Selected(source, _merged_elements(first, second), samples, ties, first._selected.further))


def _keys(
    on: str | Sequence[str] | None, left_on: str | Sequence[str] | None, right_on: str | Sequence[str] | None, how: str
) -> tuple[list[str], list[str]]:
    """Return the keys of the first data set and of the second, of equal number: at least one, or none for rows."""
    left, right = (as_list(names) for names in ((on, on) if on is not None else (left_on, right_on)))
    is_mixed = on is not None and (left_on is not None or right_on is not None)
    if bool(left) == (how == ROWS) or len(left) != len(right) or is_mixed:
        raise PartitionError(
            "the keys to merge on are not clear",
            expected='on=, or left_on= and right_on= with as many names; none of them with how="rows"',
            found=f"on={on!r}, left_on={left_on!r}, right_on={right_on!r}, how={how!r}",
            remedy="name the field that both have, such as on='id'",
        )
    return left, right


def _coordinates(data: Dataset, names: Sequence[str]) -> list[Coordinate]:
    return [Coordinate(*data._selected.source_of(name), data._samples) for name in names]


def mix(
    datasets: Sequence[Dataset],
    *,
    weights: Sequence[float],
    seed: int = 0,
    stop: Literal["first", "longest"] = "first",
) -> Dataset:
    """Return a data set whose batches have fixed shares of several data sets. *Collective*.

    Every global batch has these shares, rounded to whole samples, in an order of each data set that is shuffled like
    that of ``batches``. ``split`` and ``kfold`` divide each data set alone (by ``groups`` and ``at`` all together);
    ``statistics``, ``normalization`` and ``load`` are of all samples, each once. All batches are full
    (``remainder="drop"``).

    Parameters
    ----------
    datasets : sequence of ``Dataset``, as of ``concat``.
    weights : sequence of float above 0. Shares of the data sets in a batch; their sum is 1.
    seed : int of 0 or more. Further seed of the order, beside that of ``batches``.
    stop : end of an epoch. "first": when the first of the data sets ends; with a shuffle, the others go on in the next
        epoch with the samples that are left. "longest": when the last one ends; the others begin again, in another
        order, each time without the samples that fill no batch.

    Returns
    -------
    Dataset.

    Raises
    ------
    FormatError, PartitionError : see ``concat``; the weights are not positive or their sum is not 1; unknown ``stop``;
        the data sets were opened with ``cache="memory"``.

    Examples
    --------
    >>> low = md.open_dataset("events.h5", inputs="image", targets="label", where="label < 7")
    >>> high = md.open_dataset("events.h5", inputs="image", targets="label", where="label > 6")
    >>> data = md.mix([low, high], weights=[0.2, 0.8], stop="longest")
    >>> [int(np.sum(y > 6)) for _, y in data.batches(20, shuffle=True, seed=1)]
    [16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16]
    """
    check_arguments(mix, locals())
    joined = concat(datasets)
    mixture = _mixture(datasets, weights, seed, stop)
    source = joined._source
    if source.options.cache is not None:
        raise PartitionError(
            "the samples of a mixture are not kept in memory",
            expected="cache=None",
            found=f"cache={source.options.cache!r}",
            remedy='open the data sets without cache=, or shuffle with shuffle="global", which keeps them',
        )
    source = replace(source, transforms=source.transforms + mixture.text(), repeats=True, shared=False)
    return Dataset(replace(joined._selected, source=source, mixture=mixture))


def _opened(sources: Sequence[Source], index: Index, transforms: str, first: Source | None = None) -> Source:
    """Return the files of all sources as those of one index, with the options of one; None: of the first."""
    opened = (first or sources[0]).of_index(index, transforms)
    return replace(opened, drawn=any(one.draws_within for one in sources))


def _mixture(datasets: Sequence[Dataset], weights: Sequence[float], seed: int, stop: str) -> Mixture:
    if len(weights) != len(datasets) or not all(weight > 0 for weight in weights) or abs(sum(weights) - 1) > 1e-6:
        raise PartitionError(
            "the weights of a mixture are the shares of its data sets",
            expected=f"{len(datasets)} positive numbers whose sum is 1",
            found=f"weights={list(weights)}",
            remedy="give one for each data set, and divide each by their sum",
        )
    first = np.cumsum([0, *(len(data._source.index) for data in datasets)]).tolist()
    return Mixture(tuple(map(float, weights)), tuple(first), stop, check_seed(seed))


def _sources(datasets: Sequence[Dataset]) -> list[Source]:
    """Return the opened files of data sets that can be combined."""
    if not datasets:
        raise PartitionError("there are no data sets to combine", expected="at least one")
    sources = [data._source for data in datasets]
    check_sources(sources)
    mixed = [number for number, data in enumerate(datasets, 1) if data._selected.mixture is not None]
    if mixed:
        raise PartitionError(
            "a mixture cannot be combined further",
            found=named(sources[mixed[0] - 1], mixed[0]),
            remedy="concatenate and merge first, and mix the results",
        )
    fitted = next((number for number, data in enumerate(datasets, 1) if data._selected.imputation is not None), None)
    if fitted is not None:
        raise PartitionError(
            f"data set {fitted} has means for missing values, which a split of the result could not compute anew",
            expected='missing= without "mean" and "mode"',
            remedy="leave out missing=, or give a number, such as the mean of a training set",
        )
    return sources


def _check_elements(datasets: Sequence[Dataset], sources: Sequence[Source]) -> None:
    own = datasets[0]._elements
    for number, (data, source) in enumerate(zip(datasets, sources, strict=True), 1):
        for name in ("inputs", "targets", "weights"):
            expected, found = _listed(getattr(own, name)), _listed(getattr(data._elements, name))
            if expected != found:
                raise PartitionError(
                    f"the data sets differ in {name}",
                    expected=f"{name}={expected!r}, as of {named(sources[0], 1)}",
                    found=f"{name}={found!r} of {named(source, number)}",
                    remedy=f"open them with the same {name}=",
                )


def _listed(names: Names) -> Any:
    return names if names is None or isinstance(names, str) else list(names)


def _check_one_weight(first: Dataset, second: Dataset) -> None:
    if first._elements.weights is not None and second._elements.weights is not None:
        raise PartitionError(
            "both data sets have weights",
            expected="weights= of one of them",
            found=f"{first._elements.weights!r} and {second._elements.weights!r}",
            remedy="open one of them without weights=",
        )


def _merged_elements(first: Dataset, second: Dataset) -> ElementSpec:
    sides = [data._elements for data in (first, second)]
    weights = sides[0].weights or sides[1].weights
    if all(side.names is None for side in sides):
        return ElementSpec(None, None, weights)
    sides = [
        side if side.names is not None else replace(side, inputs=[n for n in data.schema if n != side.weights])
        for side, data in zip(sides, (first, second), strict=True)
    ]
    inputs, targets = (merge_names(*(getattr(side, name) for side in sides)) for name in ("inputs", "targets"))
    return ElementSpec(inputs, targets, weights)


def _open_all(datasets: Sequence[Dataset], name: str | None) -> tuple[Source, str]:
    """Return the opened files of all data sets with a field, and its name. *Collective*. Raises like ``concat``."""
    fields = [data._selected.source_of(name) for data in datasets]
    selected = [source.of_index(_only(source.index, field), "") for source, field in fields]
    return selected[0].of_index(join_sources(selected), ""), fields[0][1]


def _only(index: Index, name: str) -> Index:
    return index.select([name]) if name in index.fields else index
