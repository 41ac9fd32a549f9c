"""Draw mutants by a seed, evenly over groups of packages and, within a group, over operators."""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

from tests.mutants.operators import OPERATORS

GROUPS = {
    "formats of arrays and tables": (
        *("readers/hdf5", "readers/netcdf", "readers/zarr", "readers/fits", "readers/parquet", "readers/root"),
        *("readers/openpmd", "readers/*.py"),
    ),
    "formats of text and images": (
        *("readers/csv", "readers/text", "readers/lhe", "readers/hepmc", "readers/atoms", "readers/images"),
    ),
    "index": ("matex_data/index",),
    "storage, codecs, io": ("matex_data/storage", "matex_data/codecs", "matex_data/io"),
    "sampling": ("matex_data/sampling",),
    "reading": ("matex_data/reading",),
    "epochs": ("matex_data/epochs",),
    "data sets": ("matex_data/transforms", "matex_data/opening", "matex_data/*.py"),
    "mpi and commands": ("matex_data/mpi", "matex_data/launching", "matex_data/doctor", "matex_data/cli"),
    "training: the step": (
        "training/exact",
        "training/distributed_model",
        "training/average",
        "training/reduction",
        "training/comm",
    ),
    "training: unchanged scripts": ("training/launcher",),
    "training: models and runs": (
        *("training/model_parallel", "training/partition", "training/restart", "training/*.py"),
    ),
}
"""Folders with all that is in them, and patterns of modules, by the name of their group."""


@dataclass(frozen=True)
class Site:
    """Occurrence of an operator in a module, whose path is relative to the root, and its first line."""

    path: str
    operator: str
    occurrence: int
    line: int


@dataclass(frozen=True)
class Mutant:
    """A site that was drawn for a group, and its number among those of all groups."""

    number: int
    group: str
    site: Site

    def code(self, root: Path) -> str:
        """Return the source of the changed module."""
        source = (root / self.site.path).read_text()
        changed = mutate_code(source, OPERATORS[self.site.operator](), self.site.occurrence)
        assert changed is not None
        return str(changed)

    def key(self, root: Path) -> str:
        """Return a text that stays the same as long as the changed module does."""
        digest = hashlib.sha256(self.code(root).encode()).hexdigest()[:12]
        return f"{self.site.path}:{self.site.line}:{self.site.operator}:{digest}"


def draw(root: Path, seed: int, count: int) -> list[Mutant]:
    """Return ``count`` mutants, the groups in turn. A larger count gives the same ones, and more."""
    by_group = {group: _draw_group(root, group, seed) for group in GROUPS}
    mutants: list[Mutant] = []
    while len(mutants) < count:
        for group, sites in by_group.items():
            mutants.append(Mutant(len(mutants), group, next(sites)))
    return mutants[:count]


def _draw_group(root: Path, group: str, seed: int) -> Iterator[Site]:
    """Yield sites of a group: an operator at random, then one of its sites at random, each site once."""
    by_operator: dict[str, list[Site]] = defaultdict(list)
    for path in modules(root, group):
        for site in sites(root, path):
            by_operator[site.operator].append(site)
    chance = random.Random(f"{seed} {group}")
    while by_operator:
        operator = chance.choice(sorted(by_operator))
        left = by_operator[operator]
        yield left.pop(chance.randrange(len(left)))
        if not left:
            del by_operator[operator]


def modules(root: Path, group: str) -> list[Path]:
    """Return the modules of a group, sorted."""
    found: set[Path] = set()
    for pattern in GROUPS[group]:
        found.update(root.glob(pattern) if "*" in pattern else (root / pattern).rglob("*.py"))
    return sorted(found)


def sites(root: Path, path: Path) -> Iterator[Site]:
    """Yield the sites of all operators in a module, but for those in annotations and decorators."""
    tree = get_ast(path.read_text())
    for name, operator in OPERATORS.items():
        occurrence = 0
        for node in ast_nodes(tree):
            for _ in operator().mutation_positions(node):
                if _runs(node):
                    yield Site(str(path.relative_to(root)), name, occurrence, node.start_pos[0])
                occurrence += 1


def _runs(node: Any) -> bool:
    """Return whether a node is code that a function executes: in a suite of a function, and no annotation."""
    in_function = False
    while node.parent is not None:
        parent = node.parent
        annotation = parent.type == "funcdef" and node is getattr(parent, "annotation", None)
        if annotation or parent.type in ("annassign", "tfpdef", "decorator"):
            return parent.type == "annassign" and node is parent.children[-1] and _runs(parent)
        in_function |= parent.type == "funcdef" and node is parent.children[-1]
        node = parent
    return in_function
