"""One component of a record: its rows, stored or constant, and their conversion to units of the SI.

A stored number times ``unitSI`` is in units of the SI; ``unitDimension`` has the powers of the seven base units. Of a
record with an offset (``positionOffset``, in the extension also ``momentumOffset`` and ``timeOffset``), the value is
the sum of both, each in units of the SI. See "Record Components", "Constant Record Components" and "Naming
Conventions" in https://github.com/openPMD/openPMD-standard/blob/1.1.0/STANDARD.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

from matex_data.errors import FormatError
from matex_data.index.combined import Sum
from matex_data.index.library import Constant
from matex_data.index.model import Layout
from matex_data.readers.decoding import Decoding, decode_layout
from matex_data.readers.hdf5.reader import dataset_rows

UNITS = ("si", "beamphysics", "stored")
BASE_UNITS = ("m", "kg", "s", "A", "K", "mol", "cd")  # in the order of unitDimension
NAMED_UNITS = {
    "kg s^-2 A^-1": "T",
    "m kg s^-3 A^-1": "V/m",
    "m^2 kg s^-3 A^-1": "V",
    "m^2 kg s^-2": "J",
    "s A": "C",
    "m kg s^-1": "kg m/s",
    "m s^-1": "m/s",
    "s^-1": "1/s",
    "m^-3 s A": "C/m^3",
    "m^-2 A": "A/m^2",
}
MOMENTUM = ("momentum", "momentumOffset", "totalMomentum", "totalMomentumOffset")
KEPT = (
    *("unitDimension", "unitSymbol", "macroWeighted", "weightingPower", "timeOffset", "position"),
    *("geometry", "geometryParameters", "dataOrder", "axisLabels", "gridSpacing", "gridGlobalOffset", "gridUnitSI"),
    *("gridGeometry", "gridLowerBound", "gridOriginOffset", "gridSize", "eleAnchorPt", "harmonic"),
    *("fundamentalFrequency", "RFphase", "fieldScale"),
)
"""Attributes of records and components that become attributes of the field."""


@dataclass(frozen=True)
class Component:
    """One component in one iteration.

    Parameters
    ----------
    shape : of all rows; the first number of a constant component may be replaced by ``sized``.
    stored : dtype in native byte order.
    scale : factor to the units of the field; 1 if there is no conversion.
    layout : of the stored rows; None: all are ``value``.
    value : of a constant component, as stored.
    offset : component that is added after both are converted.
    """

    shape: tuple[int, ...]
    stored: np.dtype[Any]
    scale: float
    layout: Layout | None
    value: Any
    offset: Component | None
    attributes: Mapping[str, Any]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the dtype of the values: the stored one, or float64 (complex128) if they are converted."""
        dtype = self.stored if self.scale == 1 else np.result_type(self.stored, np.float64)
        return dtype if self.is_zero(self.offset) else np.result_type(dtype, np.float64)

    @staticmethod
    def is_zero(offset: Component | None) -> bool:
        """Return whether an offset changes nothing."""
        return offset is None or (offset.layout is None and not np.any(offset.value))

    def rows(self, count: int, dtype: np.dtype[Any]) -> Layout:
        """Return the layout of the values as ``dtype``; ``count``: rows of a constant component."""
        constant = 0.0
        if self.offset is not None and self.offset.layout is None and not self.is_zero(self.offset):
            constant = self.offset.value * self.offset.scale
        decoding = Decoding(dtype, scale=None if self.scale == 1 else self.scale, offset=constant or None)
        found: Layout
        if self.layout is None:
            found = Constant(count, decoding.decode(np.asarray(self.value).reshape(1))[0])
        else:
            found = self.layout
            if decoding != Decoding(self.stored):
                found = decode_layout(found, decoding, decoding)
        if self.offset is None or self.offset.layout is None:
            return found
        return Sum(found, self.offset.rows(count, dtype), dtype)


def read_component(
    path: str, name: str, record: Any, component: Any, units: str, offset: Component | None = None, grid: Any = None
) -> Component:
    """Return a component of a record.

    Parameters
    ----------
    name : ``"record/component"``, or ``"record"`` of a scalar record.
    record, component : group or data set; the same for a scalar record.
    units : one of ``UNITS``.
    offset : component of the record's offset.
    grid : group whose attributes hold for the record as well, or None.

    Raises
    ------
    FormatError : the component does not hold numbers, or cannot be read.
    """
    is_momentum = name.split("/")[0] in MOMENTUM
    factor = float(np.ravel(component.attrs.get("unitSI", 1.0))[0])
    scale = 1.0 if units == "stored" else factor
    if units == "beamphysics" and is_momentum:
        scale = factor * (299792458 / 1.602176634e-19)
    kept = _attributes([grid, record, component], factor, units, is_momentum)
    if isinstance(component, h5py.Dataset):
        field, layout = dataset_rows(component, path, component.name.strip("/"), {})
        if field.ragged or field.dtype.kind not in "iufcb":
            raise FormatError("the component holds no numbers", file=path, field=name, found=str(component.dtype))
        shape = (layout.rows, *field.shape)
        return Component(shape, field.dtype, scale, layout, None, offset, kept)
    shape = tuple(int(n) for n in np.ravel(component.attrs["shape"]))
    value = np.ravel(component.attrs["value"])[0]
    if not isinstance(value, np.number | np.bool_):
        raise FormatError("the constant component holds no number", file=path, field=name, found=repr(value))
    return Component(shape or (1,), value.dtype.newbyteorder("="), scale, None, value, offset, kept)


def _attributes(sources: Sequence[Any], factor: float, units: str, is_momentum: bool) -> dict[str, Any]:
    """Return the attributes of a field: those of its groups and data set, and what has been done to its numbers."""
    found: dict[str, Any] = {}
    for source in sources:
        if source is not None:
            found |= {key: _plain(source.attrs[key]) for key in KEPT if key in source.attrs}
    found["unitSI"] = factor
    symbol = _symbol(found.get("unitDimension"))
    if units == "beamphysics" and is_momentum:
        symbol = "eV/c"
    if units == "stored":
        if symbol is not None:
            found["units"] = symbol if factor == 1 else f"{factor!r} {symbol}".strip()
        found["converted"] = "no: the numbers are as stored; times unitSI they are in units of the SI"
        return found
    if symbol is not None:
        found["units"] = symbol
        found.pop("unitSymbol", None)  # of the stored numbers
    found["converted"] = "stored numbers times unitSI" + (", to eV/c" if symbol == "eV/c" else "")
    return found


def _plain(value: Any) -> Any:
    """Return texts as str, and arrays of them as a list."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, np.ndarray) and value.dtype.kind in "SO":
        return [_plain(item) for item in value.ravel().tolist()]
    return value


def _symbol(dimension: Sequence[float] | None) -> str | None:
    """Return a unit from the powers of the base units, such as ``"m kg s^-1"``; None if there are no powers."""
    if dimension is None or len(dimension) != len(BASE_UNITS):
        return None
    powers = [(unit, float(power)) for unit, power in zip(BASE_UNITS, dimension, strict=True) if power]
    symbol = " ".join(unit if power == 1 else f"{unit}^{power:g}" for unit, power in powers) or "1"
    return NAMED_UNITS.get(symbol, symbol)
