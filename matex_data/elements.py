"""What one batch looks like to the user: inputs, targets, weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WEIGHT = "sample_weight"
Names = str | Sequence[str] | None


def as_list(names: Names) -> list[str]:
    """The names that are meant."""
    return [] if names is None else [names] if isinstance(names, str) else list(names)


@dataclass(frozen=True)
class Elements:
    """How fields become an element: a dict of all; inputs alone; or (inputs, targets).

    Parameters
    ----------
    inputs, targets : a field name, which gives the bare value; a list of names, which gives a dict; or None.
    """

    inputs: Names = None
    targets: Names = None

    @property
    def names(self) -> list[str] | None:
        """The fields that are needed, each once; None: all."""
        if self.inputs is None and self.targets is None:
            return None
        return list(dict.fromkeys([*as_list(self.inputs), *as_list(self.targets)]))

    def assemble(self, values: Mapping[str, Any], weight: Any = None) -> Any:
        """The element made of one value per field, and of a weight per sample if there is one.

        A weight comes last in a tuple, as Keras wants it, or under the name ``sample_weight`` in a dict.
        """
        if self.inputs is None and self.targets is None:
            return dict(values) if weight is None else {**values, WEIGHT: weight}
        sides = [_side(names, values) for names in (self.inputs, self.targets) if names is not None]
        if weight is not None:
            sides.append(weight)
        return sides[0] if len(sides) == 1 else tuple(sides)


def _side(names: Names, values: Mapping[str, Any]) -> Any:
    return values[names] if isinstance(names, str) else {name: values[name] for name in as_list(names)}
