"""The cases of images: JPEGs in a folder for each class, 10,000 small files, tar shards, stacks of pages."""

from __future__ import annotations

from benchmarks.cases.reading import Goal, Measured, Setup
from benchmarks.harness.measure import Reader, afresh, interleaved
from benchmarks.readers import images

OURS = Reader("matex_data", "ours", "images.ours")
FLOATS = Reader("matex_data, float32", "ours", "images.ours", {"dtype": "float32"})
PEERS = (
    Reader("tf.data, decode_jpeg in parallel", "peer", "images.tf_data"),
    Reader("Keras image_dataset_from_directory", "peer", "images.keras_directory"),
    Reader("PyTorch DataLoader + Pillow, 2 workers", "peer", "images.torch_loader"),
)
LIMITS = {"tf.data": 1.0, "Keras": 1.5, "PyTorch": 1.5}


def photographs(setup: Setup) -> Measured:
    """Measure JPEGs of 256 x 256 pixels as they are."""
    return _against_peers(setup, None, "JPEGs of 256 x 256, as they are, shuffled, batch 64")


def resized(setup: Setup) -> Measured:
    """Measure the same, resized; all peers but PyTorch's Pillow resize to float32, and without antialiasing."""
    return _against_peers(setup, images.RESIZED, "JPEGs of 256 x 256, resized to 224 x 224, shuffled, batch 64")


def _against_peers(setup: Setup, size: images.Size, title: str) -> Measured:
    readers = [_with(reader, size=size) for reader in (OURS, FLOATS, *PEERS)]
    results = interleaved(images.photographs(setup.folder, setup.quick), readers, setup.repetitions)
    ours, _, *peers = results
    measured = [(peer, limit) for peer, limit in zip(peers, LIMITS.values(), strict=True) if peer.answers]
    goals = [Goal(f"matex_data / {peer.reader.name}", ours.over(peer), limit) for peer, limit in measured]
    return Measured(title, results, goals)


def _with(reader: Reader, **options: object) -> Reader:
    return Reader(reader.name, reader.kind, reader.function, {**reader.options, **options})


def small_files(setup: Setup) -> Measured:
    """Measure how soon the first batch of 10,000 files is there, and how often two ranks open each file."""
    task = images.thumbnails(setup.folder, setup.quick)
    first = afresh(task, Reader("first batch", "ours", "images.first_batch"), setup.repetitions)
    opens = afresh(task, Reader("opens", "ours", "images.file_opens", ranks=2), 1)
    goals = [
        Goal("seconds to the first batch", first.figure("seconds"), 1, most=True, unit=" s"),
        Goal("samples of an epoch on 2 ranks", opens.figure("samples"), task.samples, unit=""),
        Goal("opens of an epoch on 2 ranks", opens.figure("opens"), task.samples, most=True, unit=""),
    ]
    return Measured(f"{task.samples:,} small files", goals=goals)


def shards(setup: Setup) -> Measured:
    """Measure tar shards beside the same images in folders."""
    files = interleaved(images.photographs(setup.folder, setup.quick), [OURS], setup.repetitions)
    shards = Reader("matex_data, tar shards", "ours", "images.ours")
    results = interleaved(images.shards(setup.folder, setup.quick), [shards], setup.repetitions) + files
    return Measured("Tar shards", results, [Goal("tar shards / files", results[0].over(results[1]), 0.9)])


def stacks(setup: Setup) -> Measured:
    """Measure the pages of a stack beside the same pages in files."""
    stack, files = (images.pages(setup.folder, setup.quick, single) for single in (False, True))
    readers = [
        Reader("matex_data, one stack", "ours", "images.ours", {"mode": "native"}),
        Reader("tifffile + from_generator, in order", "peer", "images.tifffile_pages"),
    ]
    one = Reader("matex_data, a file for each page", "ours", "images.ours", {"mode": "native"})
    results = interleaved(stack, readers, setup.repetitions) + interleaved(files, [one], setup.repetitions)
    goals = [
        Goal("one stack / files", results[0].over(results[2]), 0.9),
        Goal("one stack, shuffled / tifffile, in order", results[0].over(results[1]), 1.5),
    ]
    return Measured("Deflated uint16 pages of 512 x 512, batch 64", results, goals)


CASES = {"images": [photographs, resized, small_files, shards, stacks]}
