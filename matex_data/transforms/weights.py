"""Sample weights from a field."""

from __future__ import annotations

from matex_data.errors import FieldNotFound, FormatError, near_matches
from matex_data.fields import WEIGHT, ElementSpec, Schema


def check_elements(elements: ElementSpec) -> None:
    """Raise ``FormatError`` if elements of this structure cannot have weights.

    Keras takes the second item of a tuple for the targets, so that (inputs, weights) would train on the weights.
    """
    if elements.weights is not None and elements.names is not None and None in (elements.inputs, elements.targets):
        side = "targets" if elements.targets is None else "inputs"
        raise FormatError(
            f"weights= needs {side}: Keras would take the second item of (x, w) for the targets",
            field=elements.weights,
            expected="inputs= and targets=, for elements (x, y, w); or neither, for dicts",
            found=f"inputs={elements.inputs!r}, targets={elements.targets!r}",
            remedy=f"name the {side}, or leave out weights= and name the weights as a field",
        )


def check_weights(elements: ElementSpec, fields: Schema) -> None:
    """Raise an error unless the weights are numbers, one for each sample.

    Raises
    ------
    FieldNotFound : there is no such field.
    FormatError : the field has several numbers for each sample, or none; in dicts, another field has the name of the
        weights.
    """
    name = elements.weights
    if name is None:
        return
    field = fields.get(name)
    if field is None:
        raise FieldNotFound("weights= names no field", field=name, expected=f"one of {near_matches(name, fields)}")
    if field.ragged or field.shape or field.dtype.kind not in "biuf":
        raise FormatError(
            "weights= needs one number for each sample",
            field=name,
            expected="integers or floats of shape ()",
            found=f"{field.dtype} of shape {field.shape}{' (ragged)' if field.ragged else ''}",
            remedy="name a field of the events, or make the objects the samples with flatten=",
        )
    if elements.names is None and WEIGHT in fields and name != WEIGHT:
        raise FormatError(
            f"the data already have a field with the name of the weights, {WEIGHT!r}",
            field=WEIGHT,
            remedy="select fields with inputs= and targets=",
        )
