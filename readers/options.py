"""Validation of the options of a reader: known names, and values of the annotated types."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from inspect import Parameter
from typing import Any, TypeVar

from matex_data.arguments import annotations_of, described, fits, parameters_of
from matex_data.errors import FormatError, near_matches

Taking = TypeVar("Taking", bound=Callable[..., Any])
_TAKEN = "options_taken"
TRUST = "trust"  # parameter of readers that is no option: the core gives it
_SPLIT = "split the data set: train, valid = data.split(0.8, 0.2, seed=1)"
_BATCHES = "give it to the batches: data.tf_dataset(batch_size, shuffle=True, seed=1), or data.batches(...)"
_LABELS = 'labels are integers, for a sparse loss: targets="label"; without labels give inputs="image" alone'
_CLASSES = 'the sorted names of the folders are data.schema["label"].attributes["class_names"]'
_FUNCTION = "give the data set a function of NumPy arrays: data.map(function), or the model layers of Keras"
ELSEWHERE = {
    "image_size": "the size of images is size=(height, width)",
    "target_size": "the size of images is size=(height, width)",
    "interpolation": 'the method is resample="bilinear", "nearest", "bicubic", "lanczos" or "box"',
    "color_mode": 'the colours are mode="rgb", "gray" or "native"',
    **dict.fromkeys(("label_mode", "class_mode"), _LABELS),
    "labels": 'labels are a field: targets="label"',
    "class_names": _CLASSES,
    "classes": _CLASSES,
    "validation_split": _SPLIT,
    "test_size": _SPLIT,
    **dict.fromkeys(("batch_size", "shuffle", "seed", "drop_last", "drop_remainder", "prefetch_factor"), _BATCHES),
    **dict.fromkeys(("transform", "transforms", "target_transform", "preprocessing_function"), _FUNCTION),
    "num_workers": "threads of each rank read ahead; MATEX_READ_THREADS and MATEX_THREADS set their numbers",
    TRUST: 'what a file may lead to is trusted=["/folder", "s3://bucket"], of all formats',
    "directory": "the folder is the first argument of open_dataset",
    "data_format": "images have their channels last; data.map() moves them: a['image'].transpose(0, 3, 1, 2)",
}
"""What says the same here, by the names of options of Keras, torchvision, PyTorch and scikit-learn."""


def check_options(format: str, function: Callable[..., Any], given: Mapping[str, Any], leading: int) -> None:
    """Check the options of the user against the signature of a reader.

    A reader with ``**options`` checks the names itself.

    Parameters
    ----------
    format : name of the format, for messages.
    leading : number of its first parameters that are not options.

    Raises
    ------
    FormatError : the reader has no such option, lacks a required one, or gets a value of another type.
    """
    parameters = parameters_of(function)
    if parameters is None:
        return
    parameters = parameters[leading:]
    kinds = (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    named = [p for p in parameters if p.kind in kinds and p.name != TRUST]
    taken = getattr(function, _TAKEN, None)
    others = [] if taken is None else [field.name for field in fields(taken) if field.kw_only is False]
    if taken is not None or not any(p.kind == p.VAR_KEYWORD for p in parameters):
        check_names(format, given, [*others, *(p.name for p in named)])
    for parameter in named:
        if parameter.default is parameter.empty and parameter.name not in given:
            raise FormatError(f"the reader of {format!r} files needs the option {parameter.name}=")
    check_types(given, {**({} if taken is None else annotations_of(taken)), **annotations_of(function)})


def takes(options: type) -> Callable[[Taking], Taking]:
    """Return a decorator of readers whose ``**options`` are the fields of a dataclass, but for keyword-only ones."""

    def declare(function: Taking) -> Taking:
        setattr(function, _TAKEN, options)
        return function

    return declare


def takes_names(function: Callable[..., Any]) -> bool:
    """Return whether a reader chooses the fields itself: its second parameter is their names, or anything."""
    parameters = parameters_of(function)
    if parameters is None:
        return True
    positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return any(p.kind in positional for p in parameters[1:]) or any(p.kind == p.VAR_POSITIONAL for p in parameters)


def check_names(format: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Check that the reader has all given options.

    Raises
    ------
    FormatError : it lacks one; the error lists all options, the nearest first.
    """
    for name in given:
        if name not in known:
            raise FormatError(
                f"the reader of {format!r} files has no option {name!r}",
                expected=f"one of {near_matches(name, known, len(known))}" if known else "no options",
                remedy=ELSEWHERE.get(
                    name, "check the spelling; help(matex_data.open_dataset) lists the options of all formats"
                ),
            )


def check_types(given: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Check values against annotations, as far as a value alone allows.

    Raises
    ------
    FormatError : a value has another type.
    """
    for name, value in given.items():
        hint = hints.get(name, Any)
        if not fits(value, hint):
            raise FormatError(f"the option {name}= has no such value", expected=described(hint), found=repr(value))
