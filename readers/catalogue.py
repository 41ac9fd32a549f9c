"""Catalogues of what readers find in files. The core alone chooses among it: by names, by patterns, or all of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from matex_data.errors import DataError, FieldNotFound, FormatError, near_matches, shortened
from matex_data.fields import Field, by_pattern, expand_names, is_pattern
from matex_data.index.interleaved import group_interleaved
from matex_data.index.model import FileIndex, Index, Layout
from matex_data.index.table import Column, Table
from matex_data.warning import warn

MAX_SHOWN = 8  # fields in an error or a warning

T = TypeVar("T")
Entry = tuple[Field, Callable[[], Layout]] | str | DataError
"""A field and the function that makes the layout of its rows; or the reason why it cannot be read, and is left out; or
the error that reading it raises."""
MakeIndex = Callable[[Mapping[str, Field], Mapping[str, Layout]], Index]
"""Makes an index of fields and the layouts of their rows."""


class Unreadable(Exception):
    """Field without an equivalent as NumPy arrays; the message says why."""


@dataclass(frozen=True)
class Catalogue:
    """Fields that a reader finds in a file.

    Parameters
    ----------
    path : of the file.
    known : names of the fields that can be read, in order.
    make : returns the index of the named fields, which are known.
    unread : reason for each field that cannot be read, by name.
    kind : what the format calls a field, such as "column", for messages.
    listed : names of the fields that are read if none is asked for; None: all that are known.
    named : names and patterns in an option of the reader, and what these may name; no folder of partitions is among it.

    Examples
    --------
    >>> import numpy as np
    >>> from matex_data.abc import MemoryRows
    >>> rows = MemoryRows(np.arange(3))
    >>> entries = {"x": (Field("x", (), rows.values.dtype), lambda: rows), "map": "it has no fields of its own"}
    >>> Catalogue.of("a.points", entries).index(["x*"]).fields["x"].shape
    ()
    """

    path: str
    known: Collection[str]
    make: Callable[[Sequence[str]], Index]
    unread: Mapping[str, str] = field(default_factory=dict)
    kind: str = "field"
    listed: Collection[str] | None = None
    named: Mapping[str, tuple[Collection[str], Collection[str]]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        path: str,
        entries: Mapping[str, Entry],
        kind: str = "field",
        listed: Collection[str] | None = None,
        finish: MakeIndex | None = None,
    ) -> Catalogue:
        """Return the catalogue of entries, of which layouts are made if they are chosen.

        Parameters
        ----------
        finish : makes the index of the chosen fields; None: that of a file of these rows.

        Examples
        --------
        >>> Catalogue.of("a.points", {"map": "it has no fields of its own"}).unread
        {'map': 'it has no fields of its own'}
        """
        found = {name: entry for name, entry in entries.items() if not isinstance(entry, str)}

        def make(names: Sequence[str]) -> Index:
            fields, layouts = dict[str, Field](), dict[str, Layout]()
            for name in names:
                entry = found[name]
                if isinstance(entry, DataError):
                    raise entry
                fields[name], layouts[name] = entry[0], entry[1]()
            layouts = group_interleaved(layouts)
            return finish(fields, layouts) if finish is not None else file_of_rows(path, fields, layouts)

        return cls(path, found, make, {name: e for name, e in entries.items() if isinstance(e, str)}, kind, listed)

    def index(self, names: Sequence[str] | None = None) -> Index:
        """Return the index of the fields of these names and patterns; None: of all, with a warning of the others.

        Raises
        ------
        FieldNotFound : there is no such field.
        FormatError : a named field cannot be read, or none at all.

        Examples
        --------
        >>> Catalogue.of("a.points", {}).index()
        Traceback (most recent call last):
        matex_data.errors.FormatError: the file has no field that can be read (file 'a.points')
          found: none
        """
        return self.make(self.chosen(names))

    def check_named(self) -> None:
        """Raise ``FieldNotFound`` for a name in an option of the reader that the file lacks.

        Of several files the first one decides: others may lack fields, and patterns may match nothing.

        Examples
        --------
        >>> Catalogue("a.csv", ["x1"], lambda names: None, named={"dtype": (["x1", "y*"], ["x1"])}).check_named()
        """
        for option, (given, known) in self.named.items():
            for name in given:
                if name not in known and not is_pattern(name) and f"/{name}=" not in self.path:
                    pattern = f"[{name[:1]}]{name[1:]}"
                    raise FieldNotFound(
                        f"{option}= names a {self.kind} that the file does not have",
                        file=self.path,
                        field=name,
                        expected=f"one of {near_matches(name, known)}" if known else None,
                        remedy=f"if later files have it, name it by a pattern, such as {pattern!r}",
                    )

    def chosen(self, names: Sequence[str] | None) -> list[str]:
        """Return the names of the fields to read; see `index`.

        Examples
        --------
        >>> Catalogue("a.csv", ["x1", "x2", "y"], lambda names: None).chosen(["y", "x*"])
        ['y', 'x1', 'x2']
        """
        every = [*self.known, *self.unread]
        if names is None:
            if not self.known:
                problem = f"the file has no {self.kind} that can be read"
                raise FormatError(problem, file=self.path, found=shown(self.unread) or "none")
            warn_of(self.path, self.unread, self.kind)
            return list(self.known if self.listed is None else self.listed)
        expanded = dict.fromkeys(expand_names(names, every, self.path))
        for name in names:
            if name in self.unread:
                raise FormatError(
                    f"the {self.kind} cannot be read",
                    file=self.path,
                    field=name,
                    found=self.unread[name],
                    remedy="select other fields with inputs= and targets=",
                )
        check_known(self.path, expanded, every, self.kind)
        warn_of(self.path, {name: self.unread[name] for name in expanded if name in self.unread}, self.kind)
        return [name for name in expanded if name not in self.unread]


def warn_of(path: str, unread: Mapping[str, str], kind: str = "field") -> None:
    """Warn of fields that are left out, if there are any.

    Parameters
    ----------
    unread : reason for each of them, by name.
    kind : what the format calls a field.
    """
    if unread:
        lines = shown(unread, "\n  ")
        what = f"{path}: {len(unread)} {plural(kind, len(unread))}"
        left_out = f"{'is' if len(unread) == 1 else 'are'} left out"
        text = f"{what} cannot be read and {left_out}\n  {lines}\n  select the fields with inputs= and targets="
        warn(text)


def given_for(option: Mapping[str, T], names: Collection[str]) -> dict[str, T]:
    """Return what an option gives for names: that of the name itself, else that of the first pattern which it fits.

    >>> given_for({"x*": "float32", "x2": "int8"}, ["x1", "x2", "y"])
    {'x1': 'float32', 'x2': 'int8'}
    """
    fitting = by_pattern(option, names)
    return {name: option[fitting[name]] for name in names if name in fitting}


def check_known(
    path: str,
    names: Iterable[str],
    known: Collection[str],
    kind: str = "field",
    remedies: Mapping[str, str] | None = None,
) -> None:
    """Raise ``FieldNotFound`` for a name that is not known.

    Parameters
    ----------
    kind : what the format calls a field.
    remedies : for names that are often asked for.

    Examples
    --------
    >>> check_known("a.csv", ["x"], ["x", "y"])
    """
    among = frozenset(known)
    for name in names:
        if name not in among:
            raise FieldNotFound(
                f"the file has no such {kind}",
                file=path,
                field=name,
                expected=f"one of {near_matches(name, known)}" if known else None,
                found=f"{len(known)} {plural(kind, len(known))}",
                remedy=(remedies or {}).get(name),
            )


def file_of_rows(path: str, fields: Mapping[str, Field], layouts: Mapping[str, Layout]) -> Index:
    """Return the index of a file of which each row is a sample."""
    return Index(fields, [FileIndex(path, next(iter(layouts.values())).rows, layouts)])


def file_of_table(path: str, fields: Mapping[str, Field], table: Table) -> Index:
    """Return the index of a file of which each row of a table is a sample, and each field a column."""
    return file_of_rows(path, fields, {name: Column(table, name) for name in fields})


def plural(kind: str, count: int) -> str:
    """Return the word for so many of a kind.

    >>> plural("branch", 2), plural("column", 1)
    ('branches', 'column')
    """
    return kind if count == 1 else kind + ("es" if kind.endswith("ch") else "s")


def shown(unread: Mapping[str, str], separator: str = "; ") -> str:
    """Return the names of fields with the reason why each cannot be read.

    >>> shown({"map": "it has no fields of its own"})
    "'map': it has no fields of its own"
    """
    return separator.join(shortened((f"{name!r}: {reason}" for name, reason in unread.items()), MAX_SHOWN))


SUBSETS = ("train", "test")


def of_subset(path: str, subset: str | None) -> MakeIndex:
    """Return the function that makes the index of a file, without samples unless it is of the subset; None: of any.

    Raises
    ------
    FormatError : there is no such subset.
    """
    if subset not in (None, *SUBSETS):
        raise FormatError("there is no such subset", file=path, expected=f"one of {SUBSETS}", found=repr(subset))
    found = "test" if re.search(r"(?<![A-Za-z])(?i:t10k|test)|Test", Path(path).name) else "train"
    return partial(file_of_rows, path) if subset in (None, found) else lambda fields, _: Index(fields, [])
