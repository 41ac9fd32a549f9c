"""A user's function of the samples of a window: what it gets, what it returns, and the check that it does."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from matex_data._types import Array, Integers
from matex_data.errors import FormatError, FunctionError, PartitionError
from matex_data.fields import Field, Schema, field_of
from matex_data.index.computed import Call
from matex_data.index.ragged import RaggedOutput
from matex_data.sampling.permutation import check_seed, sample_seeds

_ENCODED = np.frompyfunc(lambda text: text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text, 1, 1)
SEED_PARAMETERS = ("seeds", "seed")
"""Names of the parameter by which a function gets a seed for each sample."""
Declared = Mapping[str, Any]
"""Fields that a function returns: name -> ``Field``, or (shape, dtype), or dtype for one value per sample."""


@dataclass(frozen=True, eq=False)
class SampleFunction:
    """Function of the samples of a window, on whole arrays.

    Parameters
    ----------
    function : gets a dict of field name to array (samples, ...), and returns one.
    given : fields that it gets, by name.
    fields : fields that it returns, by name.
    seed : from which the seeds of samples are drawn.
    seeds_as : name of its parameter of seeds; None: it has none.
    """

    function: Callable[..., Any]
    given: Schema
    fields: Schema
    seed: int = 0
    seeds_as: str | None = None

    @classmethod
    def of(
        cls, function: Callable[..., Any], available: Schema, names: Sequence[str] | None, declared: Any, seed: int
    ) -> SampleFunction:
        """Return the function with the fields that it gets and returns.

        Parameters
        ----------
        available : fields of the samples.
        names : fields that it gets; None: all.
        declared : fields that it returns; None: those that it gets, unchanged in shape and dtype.
        seed : int of 0 or more.

        Raises
        ------
        FieldNotFound : there is no such field.
        FormatError : a declaration is not understood.
        PartitionError : the function cannot be called; the seed is no integer of 0 or more.
        """
        if not callable(function):
            raise PartitionError("map() needs a function", expected="a function of arrays", found=repr(function))
        given = {name: field_of(available, name) for name in (available if names is None else names)}
        fields = given if declared is None else {name: _field(name, value) for name, value in dict(declared).items()}
        if not fields:
            raise FormatError("the function returns no fields", expected="schema= with a field", found=repr(declared))
        return cls(function, given, fields, check_seed(seed), _seed_parameter(function))

    def returned_fields(self, arrays: Mapping[str, Array]) -> Schema:
        """Return the fields that the function returns for one sample.

        Parameters
        ----------
        arrays : of the fields that it gets, of one sample.

        Raises
        ------
        FunctionError : the function raises an error; what it returns does not tell the fields of other samples.
        """
        given = deepcopy(dict(arrays))  # which the function may change
        returned = self._called(arrays, np.zeros(1, np.int64), 0, self.given)
        if not isinstance(returned, Mapping) or not returned:
            raise self._error(
                "returns no dict",
                expected="a dict of arrays, or one array for one field",
                found=type(returned).__name__,
                remedy="name what it returns: schema={name: dtype}",
            )
        return {str(name): self._field_of(str(name), values, given.get(name)) for name, values in returned.items()}

    def _field_of(self, name: str, values: Any, before: Array | None) -> Field:
        """Return the field of an array of one sample, given that of its name which the function has got."""
        given = self.given.get(name)
        if given is not None and given.ragged:
            return given
        array = np.asarray(values)
        if array.dtype == object and given is not None and given.dtype == object:
            return given
        if array.dtype == object or not array.ndim:
            raise self._error(
                "returns a field that one sample does not tell",
                name,
                expected="an array with as many rows as samples, of numbers or texts",
                found=f"{array.dtype} of shape {array.shape}",
                remedy=f"declare it: schema={{{name!r}: (shape, dtype)}}, with None for axes that vary",
            )
        field = _field(name, (array.shape[1:], object if array.dtype.kind in "SU" else array.dtype))
        same = before is not None and np.array_equal(array, before, equal_nan=array.dtype.kind in "fc")
        return given if given is not None and field == given and same else field

    def compute(self, call: Call) -> None:
        """Fill the fields that the function returns. It gets arrays of its own, which it may change."""
        arrays: dict[str, Array] = {}
        for name, field in self.given.items():
            lists = field.ragged and isinstance(call.inputs[name], RaggedOutput)
            arrays[name] = call.lists(name).samples() if lists else deepcopy(call.inputs[name])
        for name, values in self(arrays, call.numbers(), call.epoch).items():
            call.fill(name, values)

    @property
    def name(self) -> str:
        """Name of the function, for errors."""
        return str(getattr(self.function, "__qualname__", None) or type(self.function).__name__)

    def __call__(self, arrays: Mapping[str, Array], numbers: Integers, epoch: int) -> dict[str, Any]:
        """Return the fields of samples.

        Parameters
        ----------
        arrays : of the fields that it gets.
        numbers : int64[samples], numbers of the samples in the data set.
        epoch : number of the epoch, from 0 on.

        Raises
        ------
        FunctionError : the function raises an error, or returns something else than is declared.
        """
        returned = self._called(arrays, numbers, epoch, self.fields)
        if not isinstance(returned, Mapping):
            raise self._error("returns no dict", expected="a dict of arrays", found=type(returned).__name__)
        if set(returned) != set(self.fields):
            raise self._error(
                "returns other fields than are declared",
                expected=sorted(self.fields),
                found=sorted(map(str, returned)),
                remedy="declare all fields that it returns with schema=, and no others",
            )
        return {name: self._checked(field, returned[name], len(numbers)) for name, field in self.fields.items()}

    def _called(self, arrays: Mapping[str, Array], numbers: Integers, epoch: int, fields: Schema) -> Any:
        """Return what the function returns, see `__call__`; of a single field, its array may stand for the dict."""
        seeds = {} if self.seeds_as is None else {self.seeds_as: sample_seeds(self.seed, epoch, numbers)}
        try:
            returned = self.function(dict(arrays), **seeds)
        except Exception as error:
            raise self._error(
                "raises an error",
                expected=f"arrays for {len(numbers)} samples",
                found=f"{type(error).__name__}: {error}",
                remedy=f"its argument is a dict of arrays, all samples along the first axis: {', '.join(arrays)}",
            ) from error
        is_array = not isinstance(returned, Mapping) and len(fields) == 1 and returned is not None
        return {next(iter(fields)): returned} if is_array else returned

    def _checked(self, field: Field, values: Any, samples: int) -> Any:
        """Return the values of a field as an array, or raise ``FunctionError``."""
        if field.ragged:
            return self._checked_lists(field, values, samples)
        array = np.asarray(values)
        if field.dtype == object and array.dtype.kind in "SUO":
            array = self._encoded(field, array)
        if array.shape != (samples, *field.shape) or array.dtype != field.dtype:
            raise self._error(
                "returns an array of another shape or dtype than is declared",
                field.name,
                expected=f"{field.dtype} of shape {(samples, *field.shape)}, for {samples} samples",
                found=f"{array.dtype} of shape {array.shape}",
                remedy="declare its shape (without the samples) and dtype with schema=, or convert the array: astype()"
                if array.shape[:1] == (samples,)
                else "return one row for each sample, along the first axis",
            )
        return array

    def _encoded(self, field: Field, array: NDArray[Any]) -> NDArray[Any]:
        """Return texts as byte strings, or raise ``FunctionError``."""
        if array.dtype.kind == "U":
            return np.char.encode(array, "utf-8", "surrogateescape").astype(object)
        array = array.astype(object)
        kinds = set(map(type, array.flat))
        other = next((kind for kind in kinds if not issubclass(kind, str | bytes)), None)
        if other is not None:
            raise self._error(
                "returns other objects than texts",
                field.name,
                expected="str or bytes, empty where a text is missing",
                found=other.__name__,
            )
        return array if kinds <= {bytes} else np.asarray(_ENCODED(array), object)

    def _checked_lists(self, field: Field, values: Any, samples: int) -> NDArray[Any]:
        """Return samples of a ragged field as an object array."""
        lists = field.empty(samples)
        shape = f"{field.dtype} of shape {field.sample_shape}, for {samples} samples"
        if len(values) != samples:
            raise self._error(
                "returns another number of samples", field.name, expected=shape, found=f"{len(values)} samples"
            )
        for at, value in enumerate(values):
            array = np.asarray(value)
            if field.dtype == object and array.dtype.kind in "SUO":
                array = self._encoded(field, array)
            fits = len(array.shape) == len(field.inner) and all(
                length in (None, found) for length, found in zip(field.inner, array.shape, strict=True)
            )
            if not fits or array.dtype != field.dtype:
                raise self._error(
                    "returns samples of another shape or dtype than is declared",
                    field.name,
                    expected=shape,
                    found=f"{array.dtype} of shape {array.shape}",
                )
            lists[at] = array
        return lists

    def _error(self, what: str, field: str | None = None, **facts: Any) -> FunctionError:
        return FunctionError(f"the function {self.name}() of map() {what}", field=field, **facts)

    def __getstate__(self) -> dict[str, Any]:
        try:
            pickle.dumps(self.function)
        except Exception as error:
            raise pickle.PicklingError(
                f"the function {self.name}() of map() cannot be sent to another process\n"
                "  expected: a function of a module, as of def at its top level\n"
                f"  found: {type(error).__name__}: {error}\n"
                "  remedy: define it in a module, or use threads or forked workers"
            ) from error
        return self.__dict__


def _field(name: str, declared: Any) -> Field:
    """Return a declared field; raise ``FormatError`` if the declaration is not understood."""
    if isinstance(declared, Field):
        return Field(name, declared.shape, declared.dtype, declared.ragged, declared.attributes, declared.inner)
    try:
        shape, dtype = declared if isinstance(declared, tuple) and len(declared) == 2 else ((), declared)
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        dtype = np.dtype(dtype)
        if dtype.kind == "U":
            dtype = np.dtype(object)
        if None in shape:
            return Field(name, (), dtype, ragged=True, inner=shape)
        return Field(name, tuple(map(int, shape)), dtype)
    except (TypeError, ValueError) as error:
        raise FormatError(
            "a declaration of schema= is not understood",
            field=name,
            expected='(shape, dtype), such as ((28, 28), "float32"), a dtype for one value per sample, or a Field',
            found=repr(declared),
        ) from error


def _seed_parameter(function: Callable[..., Any]) -> str | None:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # of builtin functions
        return None
    return next((name for name in SEED_PARAMETERS if name in parameters), None)
