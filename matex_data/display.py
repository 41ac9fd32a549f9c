"""Data sets for people to look at: tables as HTML, and pictures of the first samples."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from matex_data._types import Array
from matex_data.errors import DataError
from matex_data.fields import Field, Schema
from matex_data.index.model import Index
from matex_data.words import counted, nbytes_text, shortened

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWN = 6  # fields in a picture
IMAGES = 6  # samples that are drawn as pictures, one beside the other
ACROSS = 3  # fields of a row of the picture, but for images
BARS = 10  # values that are drawn as a bar each
LEAST_EDGE = 4  # of an array that is drawn as an image, in pixels
COLOUR = "#1b7837"

_STYLE = "text-align:left;padding:2px 10px 2px 0"


def table_html(header: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> str:
    """Return a table as HTML; all texts are escaped."""
    head = "".join(f'<th scope="col" style="{_STYLE}">{escape(name)}</th>' for name in header)
    body = "".join(
        "<tr>" + "".join(f'<td style="{_STYLE}">{escape(str(cell))}</td>' for cell in row) + "</tr>" for row in rows
    )
    above = f'<caption style="text-align:left">{escape(caption)}</caption>' if caption else ""
    return f"<table>{above}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def field_row(field: Field) -> list[str]:
    """Return name, shape, dtype, unit and attributes of a field as texts."""
    shape = str(field.sample_shape).replace("None", "*")
    others = {key: value for key, value in field.attributes.items() if key != "units"}
    attributes = ", ".join(f"{key}={shortened(value)}" for key, value in others.items())
    return [field.name, shape, field.dtype_name, str(field.attributes.get("units", "")), attributes]


FIELD_COLUMNS = ("field", "shape", "dtype", "unit", "attributes")


class FieldTable(Mapping[str, Field]):
    """Fields by name, which cannot be changed.

    Parameters
    ----------
    fields : the fields.
    """

    def __init__(self, fields: Schema) -> None:
        self._fields = fields

    def __getitem__(self, name: str) -> Field:
        return self._fields[name]

    def __iter__(self) -> Any:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{name!r}: {field.description}" for name, field in self._fields.items()) + "}"

    def _repr_html_(self) -> str:
        return table_html(FIELD_COLUMNS, map(field_row, self._fields.values()))


def dataset_html(title: str, fields: Schema, samples: int, first: Mapping[str, Array], layout: str) -> str:
    """Return a data set as HTML: fields, sizes, and a picture of its first samples if matplotlib is installed.

    Parameters
    ----------
    title : caption of the table.
    fields : of a sample.
    samples : number of samples.
    first : first samples, by field; empty: no picture.
    layout : how the samples lie in the files, as text.
    """
    row_bytes = sum(field.row_bytes for field in fields.values())
    sizes = f"{nbytes_text(row_bytes)} a sample, {nbytes_text(row_bytes * samples)} an epoch; {layout}"
    text = table_html(FIELD_COLUMNS, map(field_row, fields.values()), title) + f"<p>{escape(sizes)}</p>"
    if not first:
        return text
    try:
        figure = draw_samples(fields, first)
    except DataError:  # no matplotlib
        return text
    memory = io.BytesIO()
    figure.savefig(memory, format="png", dpi=70)
    names = ", ".join(list(fields)[:DRAWN])
    picture = base64.b64encode(memory.getvalue()).decode()
    alternative = escape(f"First samples of the fields {names}", quote=True)
    return text + f'<img alt="{alternative}" src="data:image/png;base64,{picture}">'


def draw_samples(fields: Schema, first: Mapping[str, Array]) -> Figure:
    """Return a figure of samples: images as pictures, vectors as curves, numbers as histograms, texts counted.

    Parameters
    ----------
    fields : of a sample.
    first : samples, by field.

    Raises
    ------
    DataError : matplotlib is not installed; there is no sample.
    """
    shown = {name: first[name] for name, field in fields.items() if name in first and _is_drawable(field)}
    shown = dict(list(shown.items())[:DRAWN])
    if not shown or not len(next(iter(shown.values()))):
        raise DataError("there is no sample to draw", expected="a sample of numbers, images or texts")
    pictures = {name: _as_images(fields[name], samples[:IMAGES]) for name, samples in shown.items()}
    others = [name for name in shown if not pictures[name]]
    groups = [[name] for name in shown if pictures[name]]
    groups += [others[start : start + ACROSS] for start in range(0, len(others), ACROSS)]
    figure = new_figure(10, 2 * len(groups))
    for row, names in zip(figure.subfigures(len(groups), 1, squeeze=False)[:, 0], groups, strict=True):
        if pictures[names[0]]:
            _draw_images(row, _title(fields[names[0]]), pictures[names[0]])
            continue
        for axis, name in zip(row.subplots(1, ACROSS, squeeze=False)[0], [*names, *[None] * ACROSS], strict=False):
            if name is None:
                axis.axis("off")
            else:
                _draw_values(axis, fields[name], shown[name])
    return figure


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure.

    Parameters
    ----------
    width, height : in inches.

    Raises
    ------
    DataError : matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DataError("the picture needs matplotlib", found=error, remedy="pip install matplotlib") from error
    return Figure(figsize=(width, height), layout="constrained")


def save_picture(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure to a file of the type that its suffix says; raise ``DataError`` if the file cannot be written."""
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:  # ValueError: an unknown suffix
        raise DataError("the picture cannot be written", file=str(path), found=error) from error


def _is_drawable(field: Field) -> bool:
    return field.dtype.kind in "biufO" and not field.nested


def _title(field: Field) -> str:
    unit = field.attributes.get("units")
    return shortened(f"{field.name} ({unit})" if unit else field.name, 48)


def _draw_images(row: Any, title: str, images: Sequence[Array]) -> None:
    row.suptitle(title, fontsize=9)
    for axis, image in zip(np.atleast_1d(row.subplots(1, IMAGES)), [*images, *[None] * IMAGES], strict=False):
        axis.axis("off")
        if image is not None:
            axis.imshow(image, cmap="gray" if image.ndim == 2 else None)


def _draw_values(axis: Any, field: Field, samples: Array) -> None:
    """Draw vectors as curves, few different values as bars, other numbers as a histogram."""
    axis.set_title(_title(field), fontsize=9)
    axis.tick_params(labelsize=7)
    if not field.ragged and len(field.shape) == 1 and field.shape[0] > 1 and field.dtype.kind in "biuf":
        axis.plot(samples[:IMAGES].T, linewidth=0.8)
        return
    numbers = np.asarray(field.join(samples) if field.ragged else samples).ravel()
    if field.dtype == object:
        numbers = np.array([_as_text(value) for value in numbers.tolist()])
    elif field.dtype.kind == "f":
        numbers = numbers[np.isfinite(numbers)]
    values, counts = np.unique(numbers, return_counts=True)
    if field.dtype == object or len(values) <= BARS:
        most = np.sort(np.argsort(-counts, kind="stable")[:BARS])
        axis.bar([shortened(value, 10) for value in values[most].tolist()], counts[most], color=COLOUR)
    else:
        axis.hist(numbers.astype(np.float64), bins=40, color=COLOUR)


def _as_images(field: Field, samples: Array) -> list[Array]:
    """Return samples as images; none if one of them is no image."""
    if field.dtype == object or (field.ragged and len(field.inner) == 1):
        return []
    images = [image for image in map(_as_image, samples) if image is not None]
    return images if len(images) == len(samples) else []


def _as_image(sample: Any) -> Array | None:
    """Return a sample as an image of gray or RGB pixels from 0 to 1; None if it is none."""
    array = np.asarray(sample)
    if array.dtype.kind not in "buif" or array.ndim not in (2, 3) or not array.size:
        return None
    if array.ndim == 3 and array.shape[2] not in (1, 3, 4):
        array = array[array.shape[0] // 2]  # the middle of a volume
    if min(array.shape[:2]) < LEAST_EDGE:
        return None
    pixels = array.astype(np.float64)
    low, high = np.nanmin(pixels), np.nanmax(pixels)
    pixels = (pixels - low) / (high - low) if high > low else np.zeros_like(pixels)
    return pixels[..., 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels


def _as_text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def described_layout(index: Index) -> str:
    """Return how the samples of the first file lie in it, as text: rows of a block, and stored bytes if known."""
    if not len(index.files):
        return "no files"
    layouts = index.files[0].layouts
    rows = max((layout.block_rows for layout in layouts.values()), default=1)
    stored = sum(layout.stored_bytes() for layout in layouts.values())
    plain = sum(index.fields[name].row_bytes * layout.rows for name, layout in layouts.items())
    text = "rows can be read alone" if rows == 1 else f"blocks of {counted(rows, 'row')}"
    if stored and plain and not any(field.ragged or field.dtype == object for field in index.fields.values()):
        text += f"; the first file stores {nbytes_text(plain)} in {nbytes_text(stored)}"
    return text
