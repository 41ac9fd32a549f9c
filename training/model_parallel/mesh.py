"""Mesh: all ranks as an array of replicas, stages and parts of one model, along whose axes layouts cut variables."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, NamedTuple

import keras
import numpy as np

from matex_data.arguments import check_arguments
from matex_data.errors import PartitionError
from matex_data.mpi.attributes import attached
from matex_data.mpi.communicator import Equal
from matex_data.mpi.library import MPI
from matex_data.training.comm.channel import open_channel
from matex_data.training.comm.world import comm_or_world

SAME_SHAPE = "let the numbers depend on the number of ranks, not on the rank"
AXES = ("data", "stages", "model")
"""Names of the axes; neighbouring ranks differ along the last one."""


class Coordinates(NamedTuple):
    """Position of a rank in a mesh.

    Attributes
    ----------
    replica : 0 to ``ranks / (stages * model) - 1``; replicas train on different rows of a batch.
    stage : 0 to ``stages - 1``; stages hold different layers.
    part : 0 to ``model - 1``; parts of a layer are different units of it.
    """

    replica: int
    stage: int
    part: int


class Mesh:
    """Array of all ranks with the axes "data", "stages" and "model". *Collective*.

    The ranks of one layer are neighbours: they exchange most. Then come the stages of a replica.

    Parameters
    ----------
    stages : ranks along which the layers of a model are cut.
    model : ranks along which the units of a layer are cut.
    comm : communicator; None: all ranks of the job.

    Attributes
    ----------
    shape : numbers of replicas, stages and parts.
    coordinates : those of this rank.
    world : all ranks of the mesh.
    data : communicator of the replicas of this rank's part of the model, for ``open_dataset``; its rank is the replica.
    stages : communicator of the stages of this replica and part; its rank is the stage.
    model : communicator of the ranks of this replica and stage, each with its part of the layers; its rank is the part.
    layouts : map that ``layout_map`` returned last; None: layouts are proposed.

    Raises
    ------
    PartitionError : on all ranks, if the shape does not divide them, or differs between ranks.

    Examples
    --------
    >>> import matex_data as md
    >>> mesh = md.training.Mesh(model=1)  # on 8 ranks with model=2: shape (4, 1, 2)
    >>> mesh.shape, mesh.coordinates
    ((1, 1, 1), Coordinates(replica=0, stage=0, part=0))
    >>> mesh.data.size
    1
    """

    def __init__(self, stages: int = 1, model: int = 1, comm: MPI.Intracomm | None = None) -> None:
        check_arguments(Mesh.__init__, locals(), "training.Mesh")
        self.world = comm_or_world(comm)
        given = Equal({"stages": stages, "model": model}, "the ranks are about to make different meshes", SAME_SHAPE)
        open_channel(self.world).communicator.agree(equal=given)
        ranks = self.world.size
        if stages < 1 or model < 1 or ranks % (stages * model):
            raise PartitionError(
                "the ranks cannot be arranged as this mesh",
                expected=f"a multiple of stages * model = {stages} * {model} ranks",
                found=f"{ranks} ranks",
                remedy="start another number of ranks, or choose stages and model whose product divides it",
            )
        self.shape = (ranks // (stages * model), stages, model)
        replica, stage, part = (int(i) for i in np.unravel_index(self.world.rank, self.shape))
        self.coordinates = Coordinates(replica, stage, part)
        self.data, self.stages, self.model = attached(self.world, _Axes).of(self.shape, self.coordinates)
        self.layouts: RankLayoutMap | None = None

    def layout_map(self, auto: bool = False) -> RankLayoutMap:
        """Return an empty ``keras.distribution.LayoutMap`` of this mesh, by which models are cut from then on.

        Its keys are regular expressions for paths of variables, its values name an axis for each dimension: "model" for
        the dimension that is cut over ranks, None for the others.

        Parameters
        ----------
        auto : propose layouts for the weights of Dense, attention and embedding layers that no key fits.

        Examples
        --------
        >>> import matex_data as md
        >>> layouts = md.training.Mesh(model=1).layout_map()
        >>> layouts[".*/up/kernel"] = (None, "model")
        >>> layouts["net/up/kernel"].axes
        (None, 'model')
        """
        self.layouts = RankLayoutMap(self, auto)
        return self.layouts


class RankLayoutMap(keras.distribution.LayoutMap):  # type: ignore[misc]  # Keras has no types
    """Layout map of a mesh of ranks, which are the devices of Keras's mesh.

    Parameters
    ----------
    proposes : layouts are proposed for weights that no key fits.
    """

    def __init__(self, mesh: Mesh, proposes: bool) -> None:
        super().__init__(keras.distribution.DeviceMesh(mesh.shape, list(AXES), np.arange(mesh.world.size)))
        self.mesh, self.proposes = mesh, proposes


class _Axes:
    """Communicators along the axes of the meshes of some ranks, the same for all meshes of one shape.

    An MPI library has some thousand communicators, and a program may make a mesh for each model that it tries.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = open_channel(comm).communicator
        self._alone = [comm] * 3
        self._by_shape: dict[tuple[int, ...], list[MPI.Intracomm]] = {}

    def of(self, shape: tuple[int, int, int], coordinates: Coordinates) -> list[MPI.Intracomm]:
        """Return the communicators of this rank along the three axes. *Collective* at the first call for each shape."""
        if self._comm.size == 1:
            return self._alone
        if shape not in self._by_shape:
            positions = np.arange(self._comm.size).reshape(shape)
            self._by_shape[shape] = []
            for axis, key in enumerate(coordinates):
                first = [0 if i == axis else own for i, own in enumerate(coordinates)]
                color = int(positions[tuple(first)])
                self._by_shape[shape].append(self._comm.split(color, key))
        return self._by_shape[shape]

    def close(self) -> None:
        """Free the communicators. *Collective*."""
        for comm in (comm for comms in self._by_shape.values() for comm in comms):
            comm.Free()


MODEL = AXES[2]


def cut_axis(layouts: Any, path: str, shape: tuple[int, ...]) -> int | None:
    """Return the axis along which a variable is cut over ranks; None: it is not.

    Raises
    ------
    PartitionError : several layouts fit the path, the layout has another number of dimensions or names an axis other
        than "model" or one twice, or the number of parts does not divide the dimension.
    """
    try:
        layout = layouts[path]
    except ValueError as error:
        raise PartitionError(
            "several layouts fit one variable",
            field=path,
            expected="one key of the layout map that fits the whole path",
            found=str(error).partition(": ")[2].partition(". ")[0],
            remedy="make the regular expressions more specific",
        ) from None
    if layout is None:
        return None
    named = [axis for axis in layout.axes if axis is not None]
    if len(layout.axes) != len(shape) or named not in ([], [MODEL]):
        raise PartitionError(
            "a layout does not fit its variable",
            field=path,
            expected=f'{len(shape)} axes, one for each dimension of {list(shape)}, of which one is "model"',
            found=layout.axes,
            remedy="give None for each dimension that stays whole",
        )
    if not named:
        return None
    axis, parts = layout.axes.index(MODEL), layouts.mesh.shape[2]
    check_divides(path, shape, axis, parts)
    return int(axis)


def check_divides(path: str, shape: tuple[int, ...], axis: int, parts: int) -> None:
    """Raise ``PartitionError`` unless a number of parts divides a dimension of a variable."""
    if shape[axis] % parts:
        raise PartitionError(
            "the number of parts does not divide a dimension of a variable",
            field=path,
            expected=f"a multiple of {parts} in dimension {axis}",
            found=list(shape),
            remedy="choose another number of units, or a mesh with another model=",
        )


def check_used(layouts: Any, paths: Iterable[str]) -> None:
    """Raise ``PartitionError`` if a layout, as one with a typing error, fits none of these paths of variables."""
    known = list(paths)
    for key in layouts:
        single = keras.distribution.LayoutMap(None)
        single[key] = layouts[key].axes
        if not any(single[path] is not None for path in known):
            near = difflib.get_close_matches(key, known, 3, 0) or known[:3]
            raise PartitionError(
                "a layout fits no variable",
                field=key,
                expected="a regular expression that fits the whole path of a variable",
                found=f"{len(known)} paths, {near} among them",
                remedy="compare with variable.path of model.variables",
            )
