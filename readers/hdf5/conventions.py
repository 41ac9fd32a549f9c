"""Known conventions for samples of variable length in HDF5: which dataset says where the samples of another begin.

| convention | files | specification |
|---|---|---|
| LHEH5 version 2 | matrices ``events`` and ``particles`` with the attribute ``properties`` | arXiv:2309.13154, and
  ``LHEH5v2.h`` of Pythia 8 |
| LHEH5 version 1 | groups ``event`` and ``particle`` of columns | arXiv:1905.05120, and ``LHEH5.h`` of Pythia 8 |
| NXevent_data | ``event_index`` beside ``event_id``, ``event_time_offset``, ... |
  https://manual.nexusformat.org/classes/base_classes/NXevent_data.html |
| LH5 (LEGEND) | groups of ``flattened_data`` and ``cumulative_length`` |
  https://legend-exp.github.io/legend-data-format-specs/dev/hdf5/ |
| hepfile | the table ``_MAP_DATASETS_TO_COUNTERS_`` | https://hepfile.readthedocs.io |
| larcv3 | a table ``extents`` of ``first`` and ``n`` beside one other dataset | ``DataFormatTypes.h`` of larcv3 |
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import h5py

from matex_data.locks import cached_property
from matex_data.readers.hdf5.members import column_names
from matex_data.readers.hdf5.names import HDF5_ERRORS, object_of, text_of

HEPFILE_MAP = "_MAP_DATASETS_TO_COUNTERS_"
HEPFILE_EVENTS = "_SINGLETONS_GROUP_"  # one value for each event
NEXUS_EVENTS = {"event_id", "event_time_offset", "event_weight", "event_pixel_id"}
VECTOR_OF_VECTORS = ("flattened_data", "cumulative_length")  # of LH5
RANGES = "ranges"  # kind of a pairing with two sources: the first element and the number of elements


@dataclass(frozen=True)
class Pairing:
    """Content of samples of variable length, and the numbers that divide it.

    Parameters
    ----------
    content : name of a dataset, a table, or a group of datasets.
    sources : names of the dataset or member with the numbers; of two with first elements and counts.
    kind : one of ``offsets.KINDS``, or ``RANGES``; None: to be found out.
    found : it is a convention of the file, not an option of the user.
    """

    content: str
    sources: tuple[str, ...]
    kind: str | None = None
    found: bool = False

    def covers(self, name: str) -> bool:
        """Return whether a field belongs to the content."""
        within = name == self.content or name.startswith(f"{self.content}/")
        return within and name not in self.sources


@dataclass(frozen=True)
class Conventions:
    """Pairings of an open file by known conventions."""

    file: h5py.File

    def pairing(self, name: str) -> Pairing | None:
        """Return the pairing that covers a field; None if there is none."""
        for pairing in self._of_file:
            if pairing.covers(name):
                return pairing
        group, _, last = name.rpartition("/")
        if last in NEXUS_EVENTS and self._is_group(group, "NX_class", "NXevent_data"):
            return Pairing(name, (f"{group}/event_index",), "starts", found=True)
        if last == VECTOR_OF_VECTORS[0] and self.is_vectors(group):
            return Pairing(name, (f"{group}/{VECTOR_OF_VECTORS[1]}",), "ends", found=True)
        return self._extents(name)

    @cached_property
    def lheh5(self) -> int | None:
        """Version of LHEH5 that the file has; None: another kind of file."""
        events, particles = (self._columns(name) for name in ("events", "particles"))
        if events is not None and particles is not None and {"start", "nparticles"} <= set(events):
            return 2
        event, particle = (object_of(self.file, name) for name in ("event", "particle"))
        if isinstance(event, h5py.Group) and isinstance(particle, h5py.Group):
            return 1 if "start" in event and "nparticles" in event else None
        return None

    @cached_property
    def _of_file(self) -> tuple[Pairing, ...]:
        if self.lheh5 == 2:
            return (Pairing("particles", ("events/start", "events/nparticles"), RANGES, found=True),)
        if self.lheh5 == 1:
            return (Pairing("particle", ("event/start", "event/nparticles"), RANGES, found=True),)
        return tuple(self._hepfile())

    def _hepfile(self) -> Sequence[Pairing]:
        counters = object_of(self.file, HEPFILE_MAP)
        if not isinstance(counters, h5py.Dataset) or counters.ndim != 2 or counters.shape[1] != 2:
            return ()
        pairs = [[bytes(cell).decode("utf-8", "replace") for cell in row] for row in counters[...]]
        return [
            Pairing(content, (counter,), "counts", found=True)
            for content, counter in pairs
            if "/" in content and not content.startswith(HEPFILE_EVENTS) and not counter.startswith(HEPFILE_EVENTS)
        ]

    def is_vectors(self, name: str) -> bool:
        """Return whether a group is a vector of vectors of LH5, of which this package reads one level."""
        with suppress(*HDF5_ERRORS):
            return self._is(h5py.Group, name) and all(
                self._is(h5py.Dataset, f"{name}/{child}") for child in VECTOR_OF_VECTORS
            )
        return False

    def _is(self, kind: type, name: str) -> bool:
        """Return whether there is an object of that kind, which is not opened: each field is asked for."""
        return bool(name) and self.file.get(name, getclass=True) is kind

    def listed(self, names: Sequence[str]) -> list[str]:
        """Return the fields of a file whose datasets have these names, if none is asked for."""
        if self.lheh5 == 2:
            return [f"{table}/{name}" for table in ("events", "particles") for name in self._columns(table) or ()]
        if self.lheh5 == 1:
            return [name for name in names if name.startswith(("event/", "particle/"))]
        vectors = [name.removesuffix(f"/{VECTOR_OF_VECTORS[0]}") for name in names]
        kept = [
            short if short != name and self.is_vectors(short) else name
            for name, short in zip(names, vectors, strict=True)
        ]
        hidden = {HEPFILE_MAP, f"{HEPFILE_EVENTS}/COUNTER"}
        return [name for name in kept if name not in hidden]

    def _extents(self, name: str) -> Pairing | None:
        """Return the pairing of larcv3: a group of the table ``extents`` and one other dataset, or its member."""
        words = name.split("/")
        for count in range(len(words) - 1, 0, -1):
            group = object_of(self.file, "/".join(words[:count]))
            if not isinstance(group, h5py.Group):
                continue
            with suppress(*HDF5_ERRORS):
                extents = None if words[count] == "extents" else group.get("extents")
                names = extents.dtype.names if isinstance(extents, h5py.Dataset) else None
                if {"first", "n"} <= set(names or ()) and len(group) == 2:
                    prefix = "/".join(words[:count])
                    sources = (f"{prefix}/extents/first", f"{prefix}/extents/n")
                    return Pairing(f"{prefix}/{words[count]}", sources, RANGES, found=True)
            return None
        return None

    def _columns(self, name: str) -> tuple[str, ...] | None:
        found = object_of(self.file, name)
        return column_names(found) if isinstance(found, h5py.Dataset) else None

    def _is_group(self, name: str, attribute: str, value: str) -> bool:
        group = object_of(self.file, name) if name else self.file
        with suppress(*HDF5_ERRORS):
            found = group.attrs.get(attribute) if isinstance(group, h5py.Group) else None
            return text_of(found) == value
        return False
