"""Index of ROOT files: the entries of a ``TTree`` or an ``RNTuple`` are the samples, its branches are the fields.

Format: ``TTree`` as uproot reads it, https://root.cern/doc/master/classTTree.html, and RNTuple 1.0,
https://github.com/root-project/root/blob/master/tree/ntuple/doc/BinaryFormatSpecification.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from matex_data._types import Integers
from matex_data.errors import DataError, FieldNotFound, FormatError, near_matches, truncated
from matex_data.fields import is_pattern
from matex_data.index.model import Index, Layout
from matex_data.index.table import Column
from matex_data.readers.catalogue import Catalogue, Unreadable, file_of_rows
from matex_data.readers.root.branches import Branches, TreeBranches, TupleFields
from matex_data.readers.root.files import choose_tree, file_error, open_file, tree_in
from matex_data.readers.root.members import BranchField, members, whole_record
from matex_data.readers.root.probe import first_line
from matex_data.storage.files import size_of
from matex_data.warning import warn

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
            found = tree_in(file, key)
            kind = TreeBranches if hasattr(found, "branches") else TupleFields
            if names is None or any(map(is_pattern, names)):
                _warn_of_friends(path, file.key(key))
            try:
                return _index(kind(path, key, found), names)
            except FieldNotFound:
                _warn_of_friends(path, file.key(key))
                raise
    except DataError:
        raise
    except Exception as error:  # uproot raises errors of many kinds for a damaged file
        raise file_error(path, error) from error


def _warn_of_friends(path: str, key: Any) -> None:
    """Warn if a tree has friends, of which uproot reads nothing: other trees with branches of the same entries."""
    chunk, _ = key.get_uncompressed_chunk_cursor()
    if b"TFriendElement" in bytes(chunk.raw_data):
        remedy = 'open each as a data set, and md.merge(tree, friend, how="rows"), or on= what both have'
        text = f"{path}: the friends of {key.name(cycle=False)!r} are not read; {remedy}"
        warn(text)


def _check_end(file: Any, path: str) -> None:
    """Raise ``FormatError`` if the file is shorter than its header says."""
    size = size_of(path)
    if size < file.file.fEND:
        raise truncated(path, size, file.file.fEND)


def _index(branches: Branches, names: Sequence[str] | None) -> Index:
    """Return the index of the fields of these names; for plain names alone, no other branch is looked at."""
    found: dict[str, tuple[str, BranchField]] = {}
    if names is not None and not any(map(is_pattern, names)):
        branches.expect([prefix for name in names for prefix in _prefixes(branches.full_name(name))])
    for name in names or ():
        entry = _find(branches, name)
        if entry is not None:
            found[name] = entry
    unread: dict[str, str] = {}
    if names is None or len(found) < len(names):
        known, unread = _readable(branches)
        found = {**known, **found}
    make = partial(_of_branches, branches, found)
    return Catalogue(branches.path, found, make, unread, "branch").index(names)


def _of_branches(branches: Branches, found: Mapping[str, tuple[str, BranchField]], names: Sequence[str]) -> Index:
    """Return the index of the fields of these names, given branch and member of each."""
    by_branch: dict[str, dict[str, BranchField]] = {}
    for name in names:
        branch, member = found[name]
        by_branch.setdefault(branch, {})[name] = member
    clusters = _clusters(branches, by_branch)
    layouts: dict[str, Layout] = {}
    for branch, of_branch in by_branch.items():
        table = branches.table(branch, of_branch, clusters)
        layouts.update({name: Column(table, name) for name in of_branch})
    fields = {name: replace(found[name][1].field, name=name) for name in names}
    return file_of_rows(branches.path, fields, {name: layouts[name] for name in names})


def _readable(branches: Branches) -> tuple[dict[str, tuple[str, BranchField]], dict[str, str]]:
    """Return branch and member of each field by name, and the reason for each branch that cannot be read."""
    known: dict[str, tuple[str, BranchField]] = {}
    unread: dict[str, str] = {}
    for branch in branches.names:
        try:
            known.update({name: (branch, member) for name, member in _members(branches, branch).items()})
        except Unreadable as reason:
            unread[branch] = f"{branches.typename(branch)}: {reason}"
    return known, unread


def _members(branches: Branches, branch: str) -> dict[str, BranchField]:
    """Return the members of a branch by name. Raise `Unreadable` if it cannot be read."""
    found = members(branches.form(branch), branch, branches.attributes(branch))
    try:
        entries = int(branches.edges(branch)[-1])
    except Exception as error:  # uproot raises errors of many kinds for baskets that do not add up
        raise Unreadable(f"uproot finds no entries: {first_line(error)}") from error
    if entries != branches.rows:
        raise Unreadable(f"it has {entries} entries, and the tree {branches.rows}")
    branches.probe(branch)
    return found


def _find(branches: Branches, name: str) -> tuple[str, BranchField] | None:
    """Return branch and member of a plain name; None if there is no such field."""
    full = branches.full_name(name)
    for branch in _prefixes(full):
        if branches.has(branch):
            member = _member(branches, branch, full, name)
            if member is not None:
                return branch, member
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
    return None


def _prefixes(name: str) -> Iterable[str]:
    """Yield the name, and what is in front of each of its dots, the longest first."""
    yield name
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _member(branches: Branches, branch: str, full: str, requested: str) -> BranchField | None:
    """Return the member ``full`` of a branch, or the whole branch; None if it has no such member."""
    try:
        found = _members(branches, branch)
        if full in found:
            return found[full]
        whole = whole_record(branches.form(branch), branch, branches.attributes(branch)) if full == branch else None
    except Unreadable as reason:
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


def _clusters(branches: Branches, selected: Iterable[str]) -> Integers:
    """Return the first entry of each block: where baskets of all branches begin.

    A block of more than `MAX_CLUSTER_BYTES` is split where baskets of its largest branch begin.
    """
    edges = {branch: branches.edges(branch) for branch in selected}
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
