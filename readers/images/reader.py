"""Index of image files: folders of classes, flat folders, pairs of images and masks, manifests, single files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from matex_data._types import Array, Integers
from matex_data.errors import FormatError
from matex_data.fields import RANDOM, Field
from matex_data.index.model import FileIndex, Index, Layout
from matex_data.index.united import concatenate
from matex_data.index.whole import FILE, files_as_samples
from matex_data.readers.catalogue import check_known, warn_of
from matex_data.readers.collective import IndexingRanks, SingleRank, on_root
from matex_data.readers.images.decoding import ImageOptions
from matex_data.readers.images.folders.files import FileValues, ImageFiles, InstanceMasks, Pages
from matex_data.readers.images.folders.headers import ImageFacts, read_facts
from matex_data.readers.images.folders.listing import Classes, Listing, list_images
from matex_data.readers.images.folders.members import ManifestValues
from matex_data.readers.images.stacks.hyperstacks import Hyperstack
from matex_data.readers.images.stacks.index import IMAGE, PATH, index_stacks
from matex_data.readers.images.texts import NumberLists, Texts
from matex_data.readers.options import check_options, takes
from matex_data.storage.trust import NONE, Trust

MASK = "mask"
PAGES = ("all", "first")
REMEDIES = {"label": "labels come from a folder per class, or from a manifest"}


def index(path: str, names: Sequence[str] | None = None, /, **options: Any) -> Index:
    """Index a folder of images, a manifest or an image file; see ``index_collectively``."""
    trust = options.pop("trust", None)
    check_options("images", index_collectively, options, leading=3)
    return index_collectively([path], names, SingleRank(), trust=trust, **options)


@takes(ImageOptions)
def index_collectively(
    paths: Sequence[str],
    names: Sequence[str] | None,
    ranks: IndexingRanks,
    /,
    *,
    layout: str | None = None,
    pairs: tuple[str, str] | None = None,
    ragged: bool = False,
    pages: str = "all",
    root: str | None = None,
    axes: Any = None,
    samples: str | None = None,
    sample: str | None = None,
    trust: Trust | None = None,
    **of_images: Any,
) -> Index:
    """Index image files. *Collective*.

    Rank 0 lists the folders. Headers are read by all ranks, each a part of the files, and only where sizes or pages
    are not known otherwise: ``size`` with ``mode`` "rgb" or "gray" needs a single one.

    Parameters
    ----------
    names : fields; None: all. ``image``; ``path``, relative to the folder; ``label`` of a folder per class; ``mask``
        of pairs; the columns of a manifest.
    layout : "classes": a folder per class. "flat": images without labels. "pairs": a folder of images, and one of
        masks with the same stems, or these two in a folder for each image. "manifest": a table of image files. None:
        found from the folders.
    pairs : names of the folder of images and of the folder of masks, for names that are not known.
    of_images : those of ``ImageOptions``. Masks are delivered in mode "native" and their own dtype, and resized by
        "nearest"; an image and its mask, of one size, get the same section.
    ragged : images keep their own sizes. A batch is an object array, in TensorFlow a RaggedTensor.
    pages : "all": the pages of TIFF, GIF and WebP files are samples. "first": only the first one.
    axes : of TIFF files with several axes of planes: their names in the order of the file, "TZCYX", or the sizes of
        those of the planes, ``{"T": 10, "Z": 5}``. None: as ImageJ's or OME's metadata say, if ``samples`` is given.
    sample : "file": all pages of a stack are one sample; a picture is one in any case. None: a page is.
    samples : axes of ``axes`` that count the samples, such as "T" or "TZ"; each sample has all others, in the order of
        the file. None: the first one, if ``axes`` is given.
    root : folder that the paths of a manifest are relative to; None: its own.
    trust : where the images of a manifest may lie, beside ``root``; local ones are read wherever they lie.

    Raises
    ------
    FieldNotFound : there is no field of that name.
    FormatError : the layout is ambiguous, the images differ in size or kind, or an option is wrong.
    DataError : there are no images, or a file of a manifest does not exist, or is not trusted.
    """
    if pages not in PAGES:
        raise FormatError("there is no such choice of pages", expected=f"one of {PAGES}", found=repr(pages))
    options = ImageOptions(**of_images)
    if ragged and options.size is not None:
        raise FormatError(
            "images of one size are not ragged",
            expected="size= or ragged=True",
            found="both",
            remedy="leave out one of them",
        )
    listings = on_root(ranks, lambda: list_images(paths, layout, root, pairs, trust or NONE))
    hyperstack = None if axes is None and samples is None else Hyperstack(axes, samples)
    if hyperstack is not None and (options.takes_section or ragged or pages == "first"):
        raise FormatError(
            "samples of several planes are read as they are stored",
            expected="axes= and samples= with mode=, size= and dtype= alone",
            found="one of ragged=, pages=, or a section of an image",
        )
    of_masks = replace(options, mode="native", resample="nearest", dtype=None)
    reading = _Reading(ranks, {IMAGE: options, MASK: of_masks}, ragged, pages, hyperstack, sample == FILE)
    return concatenate([reading.index(listing, names) for listing in listings], ranks.rank == 0)


@dataclass(frozen=True)
class _Reading:
    """Options by which listings become indexes, those of images and of masks by the name of their field."""

    ranks: IndexingRanks
    options: Mapping[str, ImageOptions]
    ragged: bool
    pages: str
    hyperstack: Hyperstack | None
    whole: bool

    def index(self, listing: Listing, names: Sequence[str] | None) -> Index:
        """Return the index of a listing. *Collective*."""
        if self.pages == "all" and not self.ragged and not self.options[IMAGE].takes_section:
            stacks = index_stacks(listing, names, self.options[IMAGE], self.ranks, self.hyperstack)
            if stacks is not None:
                return files_as_samples(stacks) if self.whole else stacks
        files = {IMAGE: listing.images} | ({} if listing.masks is None else {MASK: listing.masks})
        available = [*files, *listing.columns, PATH]
        selected = available if names is None else list(names)
        if names is None:
            warn_of(listing.path, listing.unread)
        check_known(listing.path, selected, available, remedies={**REMEDIES, **listing.unread})
        facts = {
            name: read_facts(
                listing.root,
                texts,
                self.options[name],
                self.ranks,
                self.ragged,
                self.pages,
                only_pages=name not in selected,
            )
            for name, texts in files.items()
        }
        pages = self._common_pages(listing, facts)
        if self.whole and pages.rows != len(listing.images):
            raise FormatError(
                "files with several pages are no samples",
                file=listing.path,
                expected="one picture in each file, or stacks that are read as they are stored",
                found=f"{pages.rows} pages of {len(listing.images)} files",
                remedy="leave out sample='file', or give pages='first'",
            )
        fields: dict[str, Field] = {}
        layouts: dict[str, Layout] = {}
        for name in selected:
            known = facts.get(name)
            if known is not None:
                images = self._images(listing, name, files[name], pages, known)
                fields[name], layouts[name] = images.field, images
            else:
                values = listing.images if name == PATH else listing.columns[name]
                fields[name], layouts[name] = _field(name, values), FileValues(values, pages)
        return Index(fields, [FileIndex(listing.path, pages.rows, layouts)], facts=_shared(listing))

    def _images(
        self, listing: Listing, name: str, files: Texts, pages: Pages, facts: ImageFacts
    ) -> ImageFiles | InstanceMasks:
        """Return the layout of a field of images."""
        counts = listing.mask_counts if name == MASK else None
        pages = pages if counts is None else Pages.of(len(files), None)
        field = facts.info.field(name, self.ragged)
        if self.options[name].is_random:
            field = replace(field, attributes={**field.attributes, RANDOM: True})
        images = ImageFiles(listing.root, files, pages, field, self.options[name], facts.mean_bytes)
        return images if counts is None else InstanceMasks.of(images, counts)

    def _common_pages(self, listing: Listing, facts: dict[str, ImageFacts | None]) -> Pages:
        """Return the pages of the images; raise ``FormatError`` if a mask has another number of pages."""
        counts = {name: None if known is None else known.pages for name, known in facts.items()}
        image, count = counts[IMAGE], len(listing.images)
        if listing.mask_counts is not None:
            _check_no_pages(listing, counts)
            return Pages.of(count, None)
        if MASK in counts and listing.masks is not None:
            differing = np.flatnonzero(_or_ones(image, count) != _or_ones(counts[MASK], count))
            if len(differing):
                number = int(differing[0])
                raise FormatError(
                    "an image and its mask have different numbers of pages",
                    file=f"{listing.root}/{listing.masks.text(number)}",
                    expected=f"{_or_ones(image, count)[number]} pages, as {listing.images.text(number)!r}",
                    found=f"{_or_ones(counts[MASK], count)[number]} pages",
                    remedy="open the folder with pages='first', or write the mask again",
                )
        return Pages.of(count, image)


def _check_no_pages(listing: Listing, counts: dict[str, Integers | None]) -> None:
    """Raise if images with several masks, or their masks, have pages."""
    for name, pages in counts.items():
        if pages is not None:
            files = listing.masks if name == MASK and listing.masks is not None else listing.images
            number = int(np.argmax(pages > 1))
            raise FormatError(
                "an image with several masks, or a mask of it, has several pages",
                file=f"{listing.root}/{files.text(number)}",
                expected="one page",
                found=f"{pages[number]} pages",
                remedy="open the folder with pages='first', or write one mask for each image",
            )


def _or_ones(counts: Integers | None, files: int) -> Array:
    return np.ones(files, np.uint32) if counts is None else counts


def _field(name: str, values: ManifestValues | Classes) -> Field:
    if isinstance(values, Texts):
        return Field(name, (), np.dtype(object))
    if isinstance(values, NumberLists):
        attributes = {"class_names": values.class_names} if values.class_names else {}
        numbers = values.values
        return Field(name, (), numbers.dtype, True, attributes, (None, *numbers.shape[1:]))
    if isinstance(values, Classes):
        return Field(name, (), np.dtype(np.int64), attributes={"class_names": values.names})
    return Field(name, values.shape[1:], values.dtype)


def _shared(listing: Listing) -> dict[str, str]:
    """Return the facts that all folders of a data set must share."""
    label = listing.columns.get("label")
    names = label.names if isinstance(label, Classes) else label.class_names if isinstance(label, NumberLists) else ()
    return {"the classes": ", ".join(names)} if names else {}
