"""Errors of the data path, in place of those in which TensorFlow wraps them."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator
from typing import Any

from matex_data import errors

_RAISED = re.compile(r"^matex_data\.errors\.(\w+): (.+?)\n\n", re.DOTALL | re.MULTILINE)
_VALUE = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\d+"
_LOCATION = re.compile(rf" \(((?:(?:, )?(?:file|field|row|byte) (?:{_VALUE}))+)\)$")
_FACT = re.compile(r"\n  (expected|found|remedy): ")


REMEDIES = {
    r"Cast string to \w+ is not supported": "if a field has texts where numbers are expected, open the data with "
    'dtype={"species": "category"}, which numbers them',
    r"None values not supported": "if the data have no targets, open them with inputs= and targets=",
    r"structure of `inputs` doesn't match": "several fields are a dict by name: open the data with stack=True for one "
    "array of all, or name the model's inputs like them, keras.Input(shape, name=field)",
    r"y_true and y_pred have different structures": "several targets are a dict by name: the model needs outputs of "
    "these names, keras.Model(inputs, {field: output})",
    r"expected min_ndim=2, found ndim=1": "a number of a sample has the shape (): open the data with inputs=[field], "
    "stack=True for rows of shape (1,)",
}
"""What to do about errors of Keras and TensorFlow in whose messages these patterns are found: they do not say it."""


@contextlib.contextmanager
def unwrapped_errors() -> Iterator[None]:
    """Context manager: raise the ``DataError`` that TensorFlow has wrapped in an error of its own.

    TensorFlow keeps the text of a traceback alone, from which the attributes of the error are read. To errors of data
    that do not fit the model a note is added, see `REMEDIES`.
    """
    try:
        yield
    except Exception as error:
        found = _RAISED.findall(str(error))
        if not found or isinstance(error, errors.DataError):
            for remedy in (remedy for pattern, remedy in REMEDIES.items() if re.search(pattern, str(error))):
                if f"remedy: {remedy}" not in getattr(error, "__notes__", ()):
                    error.add_note(f"remedy: {remedy}")
            raise
        kind, text = found[-1]  # the ones before are its causes, which lack what was added to them
        problem, facts = parsed(text)
        raise getattr(errors, kind)(problem, **facts) from error.__cause__


def parsed(text: str) -> tuple[str, dict[str, Any]]:
    """Return the problem and the facts of a ``DataError`` that has this text.

    Examples
    --------
    >>> parsed("a chunk (of 4 rows) does not decode (file 'x.h5', row 1024)\\n  remedy: restore it")
    ('a chunk (of 4 rows) does not decode', {'file': 'x.h5', 'row': 1024, 'remedy': 'restore it'})
    """
    problem, *rest = _FACT.split(text)
    location, facts = _LOCATION.search(problem), dict[str, Any]()
    if location is not None:
        problem = problem[: location.start()]
        facts = {name: ast.literal_eval(value) for name, value in re.findall(rf"(\w+) ({_VALUE})", location[1])}
    return problem, facts | dict(zip(rest[::2], rest[1::2], strict=True))
