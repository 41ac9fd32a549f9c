"""Branches of a ``TTree`` and fields of an ``RNTuple``: their types, and where their entries are stored."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import awkward as ak
import numpy as np
from uproot.interpretation import Interpretation
from uproot.interpretation.grouped import AsGrouped
from uproot.interpretation.jagged import AsJagged
from uproot.interpretation.numerical import AsDtype, TruncatedNumerical
from uproot.interpretation.objects import AsObjects, AsStridedObjects
from uproot.interpretation.strings import AsStrings

from matex_data._types import Integers
from matex_data.errors import FormatError
from matex_data.locks import cached_property
from matex_data.readers.catalogue import Unreadable
from matex_data.readers.root.baskets import Baskets, Encoding
from matex_data.readers.root.entries import BranchBlocks, Clusters
from matex_data.readers.root.members import BranchField
from matex_data.readers.root.probe import first_line, unreadable

OFFSETS_LEFT_OUT = 1  # bit of TTree's fIOFeatures: baskets without byte offsets where a branch of counts has them
BITS = 15  # kBits, the type of ``TObject::fBits``: if others refer to the object, the number of a process is behind it
OBJECT_BYTES = 64  # guessed size of an entry of variable length


@dataclass(frozen=True)
class Branches(ABC):
    """Branches of one tree, by name.

    Parameters
    ----------
    key : of the tree in the file.
    tree : of uproot.
    """

    path: str
    key: str
    tree: Any

    @property
    def rows(self) -> int:
        """Number of entries."""
        return int(self.tree.num_entries)

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """Names of all branches that have entries."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Return whether there is a branch of that name that has entries."""

    @abstractmethod
    def typename(self, name: str) -> str:
        """Return the C++ type of a branch."""

    @abstractmethod
    def form(self, name: str) -> ak.forms.Form:
        """Return the awkward form of an entry. Raise `Unreadable` if uproot cannot interpret it."""

    @abstractmethod
    def edges(self, name: str) -> Integers:
        """Return the first entry of each basket or cluster of a branch, and the number of entries."""

    def stored_bytes(self, name: str) -> int:
        """Return the size of a branch in the file, in bytes; 0 if it is unknown."""
        return 0

    def table(self, name: str, members: Mapping[str, BranchField], clusters: Integers) -> BranchBlocks:
        """Return the layout of a branch: without an override, uproot reads its entries."""
        return self.by_uproot(name, members, clusters)

    def by_uproot(
        self, name: str, members: Mapping[str, BranchField], clusters: Integers, counted: bool = False
    ) -> Clusters:
        """Return the layout of a branch whose entries uproot reads; ``counted``: of `Clusters`."""
        known = sum(m.field.row_bytes if m.kind == "flat" else OBJECT_BYTES for m in members.values())
        return Clusters(self.path, self.edges(name), name, members, clusters, self.key, known, counted)

    def probe(self, name: str) -> None:  # noqa: B027 (the form of most branches tells)
        """Read one entry if only that shows whether uproot can. Raise `Unreadable` if it cannot."""

    def expect(self, names: Sequence[str]) -> None:  # noqa: B027 (most kinds of trees need not know)
        """Take note that only these branches will be probed."""

    def parts(self, name: str) -> list[str]:
        """Return the branches that a branch consists of, if it has no entries itself."""
        return []

    def full_name(self, name: str) -> str:
        """Return the name of the branch that has this short name; the name itself if no or several branches do."""
        return name

    def attributes(self, name: str) -> Mapping[str, Any]:
        """Return the attributes of the fields of a branch."""
        return {"type": self.typename(name)}


@dataclass(frozen=True)
class TreeBranches(Branches):
    """Branches of a ``TTree``."""

    _branches: dict[str, Any] = field(init=False, default_factory=dict)
    _expected: set[str] = field(init=False, default_factory=set)
    _probed: set[str] = field(init=False, default_factory=set)
    _edges: dict[bytes, Integers] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for name, branch in self.tree.iteritems(recursive=True):
            self._branches.setdefault(name, branch)

    @property
    def names(self) -> list[str]:
        return [name for name in self._branches if self.has(name)]

    def has(self, name: str) -> bool:
        return name in self._branches and not isinstance(self._interpretation(name), AsGrouped)

    def _interpretation(self, name: str) -> Any:
        """Return the interpretation of a branch, or the error that uproot raises or returns for it."""
        try:
            return self._branches[name].interpretation
        except Exception as error:  # of many kinds, for types that uproot does not foresee
            return error

    def parts(self, name: str) -> list[str]:
        branch = self._branches.get(name)
        if branch is None or not isinstance(self._interpretation(name), AsGrouped):
            return []
        return [other for other in self.names if other.startswith(f"{name}/")]

    def full_name(self, name: str) -> str:
        return name if name in self._branches else self._by_short_name.get(name, name)

    @cached_property
    def _by_short_name(self) -> Mapping[str, str]:
        """Return the full name of each short name that only one branch has."""
        short = {full: branch.name for full, branch in self._branches.items()}
        count = Counter(short.values())
        return {name: full for full, name in short.items() if count[name] == 1}

    def typename(self, name: str) -> str:
        branch, interpretation = self._branches[name], self._interpretation(name)
        if isinstance(interpretation, Interpretation):
            with contextlib.suppress(KeyError):  # arrays of structures
                return str(branch.typename)
        kinds = [leaf.member("fTypeName", none_if_missing=True) for leaf in branch.member("fLeaves")]
        return str(branch.member("fClassName", none_if_missing=True) or ", ".join(filter(None, kinds)) or "unknown")

    def attributes(self, name: str) -> Mapping[str, Any]:
        title = self._branches[name].title
        described = title and not title.startswith(self._branches[name].name)  # otherwise: name, shape and type code
        return {"type": self.typename(name), "title": title} if described else {"type": self.typename(name)}

    def form(self, name: str) -> ak.forms.Form:
        interpretation = self._interpretation(name)
        if not isinstance(interpretation, Interpretation):
            reason = getattr(interpretation, "reason", None) or first_line(interpretation)
            raise Unreadable(f"uproot has no interpretation of it: {reason}")
        element = interpretation.content if isinstance(interpretation, AsJagged) else None
        if isinstance(element, TruncatedNumerical) and element.to_dims:
            raise Unreadable("uproot takes lists of arrays of Double32_t or Float16_t for longer lists")
        if type(interpretation) is AsDtype and interpretation.to_dtype.names:  # uproot has no form of arrays in them
            return ak.from_numpy(np.empty(0, interpretation.to_dtype), regulararray=True).layout.form
        try:
            return interpretation.awkward_form(self._branches[name].file)
        except Exception as error:  # of many kinds, and some are raised for any unusual type
            reason = getattr(error, "because", None) or first_line(error)
            raise Unreadable(f"uproot cannot read it as arrays: {reason}") from error

    def probe(self, name: str) -> None:
        if self._has_class(name):
            reason = self._unreadable.get(name)
            if reason is not None:
                raise Unreadable(f"uproot cannot read its objects: {reason}")
        elif self._may_be_misread(name) and name not in self._probed:
            try:
                self._branches[name].array(entry_start=0, entry_stop=1, library="ak")
                is_misread = _has_other_sizes(self._branches[name])
            except Exception as error:  # of many kinds
                raise Unreadable(f"uproot cannot read its objects: {first_line(error)}") from error
            if is_misread:
                raise Unreadable("uproot misreads lists with more than the elements in them, such as references")
            self._probed.add(name)

    def expect(self, names: Sequence[str]) -> None:
        self._expected.update(name for name in names if name in self._branches)

    def _has_class(self, name: str) -> bool:
        """Return whether entries are objects of a class and of no fixed size."""
        interpretation = self._interpretation(name)
        return isinstance(interpretation, AsObjects) and "Model_" in repr(interpretation)

    def _may_be_misread(self, name: str) -> bool:
        """Return whether entries have structures, which may be stored member by member, or bits of a ``TObject``."""
        branch, interpretation = self._branches[name], self._interpretation(name)
        element = interpretation.content if isinstance(interpretation, AsJagged) else interpretation
        has_bits = branch.streamer is not None and branch.streamer.member("fType", none_if_missing=True) == BITS
        return bool(branch.num_entries) and (has_bits or isinstance(element, AsObjects | AsStridedObjects))

    @cached_property
    def _unreadable(self) -> Mapping[str, str]:
        """Return the reasons why uproot cannot read branches of objects, by name of the branch."""
        among = self._expected or self._branches
        names = [name for name in among if self._has_class(name) and self._branches[name].num_entries]
        return unreadable(self.path, self.key, names)

    def edges(self, name: str) -> Integers:
        edges = np.unique(np.asarray(self._branches[name].entry_offsets, np.int64))
        return self._edges.setdefault(edges.tobytes(), edges)  # most branches share one array, in the index too

    def stored_bytes(self, name: str) -> int:
        return int(self._branches[name].member("fZipBytes"))

    def table(self, name: str, members: Mapping[str, BranchField], clusters: Integers) -> BranchBlocks:
        branch = self._branches[name]
        entries = np.asarray(branch.entry_offsets, np.int64)
        encoding = _encoding(branch.interpretation)
        kinds = {member.kind for member in members.values()}
        counted = self._lacks_offsets(branch)
        if encoding is None or "nested" in kinds or len(branch.embedded_baskets) or counted:
            return self.by_uproot(name, members, clusters, counted and encoding is not None)
        filled = np.flatnonzero(np.diff(entries))
        offset, nbytes = (np.asarray(branch.member(key), np.int64)[filled] for key in ("fBasketSeek", "fBasketBytes"))
        if offset.min(initial=0) < 0 or nbytes.min(initial=0) < 0:
            raise FormatError(
                "the list of baskets is damaged",
                file=self.path,
                field=name,
                found=f"a basket of {nbytes.min()} bytes, the first one at byte {offset.min()}",
                remedy="restore the file from its source",
            )
        ratio = branch.uncompressed_bytes / max(1, int(nbytes.sum()))
        edges = self.edges(name)
        return Baskets(self.path, edges, name, members, clusters, offset, nbytes, max(1.0, ratio), encoding)

    def _lacks_offsets(self, branch: Any) -> bool:
        """Return whether the entries of a branch are separated by the counts of another branch alone."""
        features = self.tree.member("fIOFeatures", none_if_missing=True)
        if features is None or not features.member("fIOBits") & OFFSETS_LEFT_OUT:
            return False
        return isinstance(branch.interpretation, AsJagged) and branch.count_branch is not None


def _has_other_sizes(branch: Any) -> bool:
    """Return whether lists in the first basket have other sizes than those of their elements."""
    if not isinstance(branch.interpretation, AsJagged) or not hasattr(branch.interpretation.content, "from_dtype"):
        return False
    offsets = branch.basket(0).byte_offsets
    header, element = branch.interpretation.header_bytes, branch.interpretation.content.from_dtype.itemsize
    return offsets is not None and bool(((np.diff(offsets) - header) % element).any())


def _encoding(interpretation: Any) -> Encoding | None:
    """Return the encoding of entries that byte ranges hold; None: only uproot can read them."""
    if isinstance(interpretation, AsStrings):
        header, length = interpretation.header_bytes, interpretation.length_bytes
        return Encoding("text", np.dtype("u1"), header, length)
    jagged = isinstance(interpretation, AsJagged)
    element = interpretation.content if isinstance(interpretation, AsJagged) else interpretation
    if type(element) not in (AsDtype, AsStridedObjects) or element.to_dtype != element.from_dtype.newbyteorder("="):
        return None
    header = interpretation.header_bytes if isinstance(interpretation, AsJagged) else 0
    padded = isinstance(element, AsStridedObjects) and element.all_headers_prepended and not jagged
    return Encoding("jagged" if jagged else "flat", element.from_dtype, header, padded=padded)


@dataclass(frozen=True)
class TupleFields(Branches):
    """Top-level fields of an ``RNTuple``."""

    @cached_property
    def names(self) -> list[str]:
        return list(self.tree.keys(recursive=False))

    def has(self, name: str) -> bool:
        return name in self.names

    def typename(self, name: str) -> str:
        return str(self.tree[name].typename)

    def form(self, name: str) -> ak.forms.Form:
        try:
            form, path = self.tree[name].to_akform()
            for key in path:
                form = form.content(key)
        except Exception as error:  # of many kinds
            raise Unreadable(f"uproot cannot read it as arrays: {first_line(error)}") from error
        return form

    def edges(self, name: str) -> Integers:
        first = [int(cluster.num_first_entry) for cluster in self.tree.cluster_summaries]
        return np.unique(np.array([0, *first, self.rows], np.int64))
