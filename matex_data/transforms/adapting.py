"""Preprocessing layers of Keras, adapted to all samples of a data set on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from matex_data.errors import ArgumentError, FormatError
from matex_data.fields import ElementSpec, as_list
from matex_data.index.runs import Samples
from matex_data.reading.plan import Arrays
from matex_data.reading.samples import SampleReader
from matex_data.reading.source import Source
from matex_data.transforms.splits import SourceOf
from matex_data.transforms.statistics import layer_moments, statistics


def adapt(
    layer: Any, source: Source, source_of: SourceOf, elements: ElementSpec, samples: Samples, field: str | None
) -> None:
    """Adapt a layer, or a ``FeatureSpace``; see ``Dataset.adapt``. *Collective*.

    Parameters
    ----------
    source : the opened files.
    source_of : opens a field of the data set or of its files.
    elements : structure of a batch.
    samples : of the data set, ascending.
    field : that the layer gets; None: the input.
    """
    from matex_data.epochs.tfdata import is_feature_space, is_normalization

    if not callable(getattr(layer, "adapt", None)):
        expected = "a preprocessing layer of Keras, as Normalization or StringLookup, or a FeatureSpace"
        raise ArgumentError("this cannot be adapted", expected=expected, found=repr(layer))
    if is_feature_space(layer):
        _adapt_to_all(layer, source, samples, as_list(elements.inputs) or list(source.index.fields), as_dict=True)
        return
    names = as_list(elements.inputs) if field is None else [field]
    if len(names) != 1:
        raise FormatError(
            "a layer is adapted to one field",
            expected="a data set with one input, or the field to adapt to",
            found=f"inputs={elements.inputs!r}",
            remedy="name it: data.adapt(layer, field)",
        )
    of_field, name = source_of(names[0])
    if is_normalization(layer):
        _normalize(layer, of_field, samples, name)
    else:
        _adapt_to_all(layer, of_field, samples, [name], as_dict=False)


def _normalize(layer: Any, source: Source, samples: Samples, name: str) -> None:
    """Give a layer mean and variance of a field. *Collective*."""
    mean, variance = layer_moments(statistics(source, samples, [name], tuple(layer.axis) or None)[name])
    if not layer.built:
        shape = source.index.fields[name].sample_shape
        layer.axis = layer.axis if shape else ()  # a scalar has no axis to keep: that of the batch is none of it
        layer.build((None, *shape))
    layer.adapt_mean.assign(mean.reshape(layer.adapt_mean.shape))
    layer.adapt_variance.assign(variance.reshape(layer.adapt_variance.shape))
    layer.finalize_state()


def _adapt_to_all(layer: Any, source: Source, samples: Samples, names: list[str], as_dict: bool) -> None:
    """Let a layer see the fields of all samples, which each rank reads on its own. *Collective*."""
    from matex_data.epochs.tfdata import of_generator

    index = source.index.select(names)
    reader = SampleReader(source.of_index(index, ""), samples)

    def batches() -> Iterator[Arrays]:
        yield from (arrays for arrays in reader.windows() if len(arrays[names[0]]))

    error: Exception | None = None
    try:
        data = of_generator(batches, index.fields)
        layer.adapt(data if as_dict else data.map(lambda arrays: arrays[names[0]]))
    except Exception as problem:
        error = problem
    source.comm.agree(error)
