"""Index of ROOT files: the entries of a ``TTree`` or an ``RNTuple`` are the samples, its branches are the fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from matex_data._types import Integers
from matex_data.errors import DataError, FieldNotFound, FormatError, near_matches
from matex_data.fields import Field, expand_names, is_pattern
from matex_data.index.model import FileIndex, Index, Layout
from matex_data.index.table import Column
from matex_data.readers import left_out
from matex_data.readers.root.branches import Branches, TreeBranches, TupleFields
from matex_data.readers.root.files import choose_tree, file_error, open_file
from matex_data.readers.root.members import Member, UnreadableType, members, whole_record
from matex_data.readers.root.probe import first_line
from matex_data.storage.files import size_of

MAX_CLUSTER_BYTES = 32 << 20  # stored bytes of the selected branches in one block, about


def index(path: str, names: Sequence[str] | None = None, *, tree: str | None = None) -> Index:
    """Index the entries of a tree.

    Parameters
    ----------
    names : branches by their full name (``"Muon_pt"``, ``"Evt/hits/hits.id"``) or by a short name that only one branch
        has (``"hits.id"``); members of structures as ``"<branch>.<member>"``; patterns (``"Muon_*"``). A structure of
        numbers can be read as one field of a structured dtype as well. None: all fields, structures by their members; a
        warning lists branches that cannot be read.
    tree : name of the ``TTree`` or ``RNTuple``, with its folder. None: the only one.

    Raises
    ------
    FieldNotFound : there is no branch of that name.
    FormatError : the file is damaged or no ROOT file, has no such tree, or a branch cannot be read.
    """
    file = open_file(path)
    try:
        with file:
            _check_end(file, path)
            key = choose_tree(file, path, tree)
            found = file[key]
            kind = TreeBranches if hasattr(found, "branches") else TupleFields
            return _index(kind(path, key, found), names)
    except DataError:
        raise
    except Exception as error:  # uproot raises errors of many kinds for a damaged file
        raise file_error(path, error) from error


def _check_end(file: Any, path: str) -> None:
    """Raise ``FormatError`` if the file is shorter than its header says."""
    size = size_of(path)
    if size < file.file.fEND:
        raise FormatError(
            "the file is truncated",
            file=path,
            byte=size,
            expected=f"{file.file.fEND} bytes",
            found=f"{size} bytes",
            remedy="copy it again from its source",
        )


@dataclass
class _Selected:
    """Members of the branches to read.

    Parameters
    ----------
    fields : by name, as requested.
    by_branch : for each branch, its members by the name of the field.
    """

    fields: dict[str, Field] = field(default_factory=dict)
    by_branch: dict[str, dict[str, Member]] = field(default_factory=dict)

    def add(self, name: str, branch: str, member: Member) -> None:
        """Add a member as the field ``name``."""
        self.fields[name] = Field(name, *_properties(member.field))
        self.by_branch.setdefault(branch, {})[name] = member


def _properties(found: Field) -> tuple[Any, ...]:
    return found.shape, found.dtype, found.ragged, found.attributes


def _index(branches: Branches, names: Sequence[str] | None) -> Index:
    selected = _all(branches) if names is None else _named(branches, names)
    if not selected.fields:
        raise FormatError("the tree has no branches", file=branches.path, expected="at least one", found=branches.key)
    clusters = _clusters(branches, selected)
    layouts: dict[str, Layout] = {}
    for branch, of_branch in selected.by_branch.items():
        table = branches.table(branch, of_branch, clusters)
        layouts.update({name: Column(table, name) for name in of_branch})
    rows = next(iter(layouts.values())).rows
    return Index(selected.fields, [FileIndex(branches.path, rows, {n: layouts[n] for n in selected.fields})])


def _all(branches: Branches) -> _Selected:
    """Select all members of all branches that can be read; warn of the others."""
    return _select(branches, *_readable(branches))


def _readable(branches: Branches) -> tuple[dict[str, tuple[str, Member]], dict[str, str]]:
    """Return branch and member of each field by name, and the reason for each branch that cannot be read."""
    known: dict[str, tuple[str, Member]] = {}
    unread: dict[str, str] = {}
    for branch in branches.names:
        try:
            known.update({name: (branch, member) for name, member in _members(branches, branch).items()})
        except UnreadableType as reason:
            unread[branch] = f"{branches.typename(branch)}: {reason}"
    return known, unread


def _select(branches: Branches, known: Mapping[str, tuple[str, Member]], unread: Mapping[str, str]) -> _Selected:
    """Select all known members; warn of the branches that cannot be read."""
    selected = _Selected()
    for name, (branch, member) in known.items():
        selected.add(name, branch, member)
    if unread and not known:
        raise FormatError(
            "no branch of the tree can be read", file=branches.path, expected="numbers", found=left_out.shown(unread)
        )
    if unread:
        kind = "branches" if len(unread) > 1 else "branch"
        left_out.warn(f"{branches.path}: {len(unread)} {kind} of {branches.key!r}", unread)
    return selected


def _members(branches: Branches, branch: str) -> dict[str, Member]:
    """Return the members of a branch by name. Raise `UnreadableType` if it cannot be read."""
    found = members(branches.form(branch), branch, branches.attributes(branch))
    try:
        entries = int(branches.edges(branch)[-1])
    except Exception as error:  # uproot raises errors of many kinds for baskets that do not add up
        raise UnreadableType(f"uproot finds no entries: {first_line(error)}") from error
    if entries != branches.rows:
        raise UnreadableType(f"it has {entries} entries, and the tree {branches.rows}")
    branches.probe(branch)
    return found


def _named(branches: Branches, names: Sequence[str]) -> _Selected:
    """Select the fields of these names and patterns; for names alone, no other branch is looked at."""
    selected = _Selected()
    if not any(map(is_pattern, names)):
        branches.expect([prefix for name in names for prefix in _prefixes(branches.full_name(name))])
    for name in names:
        if not _add(branches, name, selected):
            _add_matches(branches, name, selected)
    return selected


def _add(branches: Branches, name: str, selected: _Selected) -> bool:
    """Select the field of a plain name, and return whether there is one."""
    full = branches.full_name(name)
    for branch in _prefixes(full):
        if branches.has(branch):
            member = _find(branches, branch, full, name)
            if member is not None:
                selected.add(name, branch, member)
                return True
    parts = branches.parts(full)
    if parts:
        raise FormatError(
            "the branch has no entries itself, but branches that have",
            file=branches.path,
            field=name,
            expected=f"one of {near_matches(name, parts)}",
            found=f"a branch of type {branches.typename(full)}",
            remedy=f"select them by name, or all of them with {full + '/*'!r}",
        )
    return False


def _prefixes(name: str) -> Iterable[str]:
    """Yield the name, and what is in front of each of its dots, the longest first."""
    yield name
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _find(branches: Branches, branch: str, full: str, requested: str) -> Member | None:
    """Return the member ``full`` of a branch, or the whole branch; None if it has no such member."""
    try:
        found = _members(branches, branch)
        if full in found:
            return found[full]
        whole = whole_record(branches.form(branch), branch, branches.attributes(branch)) if full == branch else None
    except UnreadableType as reason:
        raise FormatError(
            "the branch cannot be read",
            file=branches.path,
            field=requested,
            expected="numbers, strings, or lists and structures of these",
            found=f"{branches.typename(branch)}: {reason}",
            remedy="select other branches with inputs= and targets=",
        ) from reason
    if whole is None and full == branch:
        raise FormatError(
            "the structure cannot be read as one field",
            file=branches.path,
            field=requested,
            expected=f"one of {near_matches(requested, found)}",
            found=branches.typename(branch),
            remedy=f"select its members by name, or all of them with {branch + '.*'!r}",
        )
    return whole


def _add_matches(branches: Branches, pattern: str, selected: _Selected) -> None:
    """Select all fields that match a pattern; warn of branches that match it and cannot be read.

    Raises
    ------
    FieldNotFound : there is none.
    """
    known, unread = _readable(branches)
    if not is_pattern(pattern):
        raise FieldNotFound(
            "the file has no such branch",
            file=branches.path,
            field=pattern,
            expected=f"one of {near_matches(pattern, [*known, *unread])}",
            found=f"the tree {branches.key!r} with {len(known) + len(unread)} fields",
        )
    matching = expand_names([pattern], [*known, *unread], branches.path)
    found = _select(
        branches,
        {name: known[name] for name in matching if name in known},
        {name: unread[name] for name in matching if name in unread},
    )
    for branch, of_branch in found.by_branch.items():
        for name, member in of_branch.items():
            selected.add(name, branch, member)


def _clusters(branches: Branches, selected: _Selected) -> Integers:
    """Return the first entry of each block: where baskets of all branches begin.

    A block of more than `MAX_CLUSTER_BYTES` is split where baskets of its largest branch begin.
    """
    edges = {branch: branches.edges(branch) for branch in selected.by_branch}
    shared = next(iter(edges.values()))
    for other in edges.values():
        shared = np.intersect1d(shared, other, assume_unique=True)
    stored = {branch: branches.stored_bytes(branch) for branch in edges}
    rows = int(shared[-1])
    total = max(1, sum(stored.values()))
    finest = edges[max(stored, key=lambda branch: stored[branch])]
    large = np.flatnonzero(np.diff(shared) / max(1, rows) * total > MAX_CLUSTER_BYTES)
    inner = [finest[(finest > shared[i]) & (finest < shared[i + 1])] for i in large.tolist()]
    return np.unique(np.concatenate([shared[:-1], *inner])).astype(np.int64)
