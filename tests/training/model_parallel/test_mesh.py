"""The mesh: which ranks are replicas, stages and parts of one another."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from matex_data.errors import PartitionError
from matex_data.training.checking.shards import RankPair
from matex_data.training.comm.channel import open_channel
from matex_data.training.model_parallel.mesh import Mesh
from tests.support.launch import run_script
from tests.support.machine_speed import scaled
from tests.support.ranks import Pool, Pools


def _members(comm, stages, model):
    mesh = Mesh(stages, model, comm)
    axes = {name: getattr(mesh, name).allgather(comm.rank) for name in ("data", "stages", "model")}
    own = {name: getattr(mesh, name).rank for name in axes}
    return mesh.shape, tuple(mesh.coordinates), axes, own


@pytest.mark.parametrize(("stages", "model"), [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)])
def test_axes_are_those_of_a_reshaped_array(ranks: Pools, stages: int, model: int) -> None:
    array = np.arange(4).reshape(-1, stages, model)
    for rank, (shape, coordinates, axes, own) in enumerate(ranks(4).run(_members, stages, model)):
        replica, stage, part = np.argwhere(array == rank)[0]
        assert (shape, coordinates) == (array.shape, (replica, stage, part))
        assert axes == {
            "data": array[:, stage, part].tolist(),
            "stages": array[replica, :, part].tolist(),
            "model": array[replica, stage, :].tolist(),
        }
        assert own == {"data": replica, "stages": stage, "model": part}


def _many(comm, number):
    meshes = [Mesh(model=comm.size, comm=comm) for _ in range(number)]
    channel = open_channel(comm)
    for _ in range(number):
        for i in range(2):
            with RankPair(channel, i).joined():
                pass
    return len({mesh.model.handle for mesh in meshes}), meshes[-1].model.allgather(comm.rank)


def test_meshes_and_checks_of_one_shape_share_their_communicators(pool: Pool) -> None:
    """MPICH ends the process at some 2,000 communicators."""
    number = 700 if pool.size > 1 else 1
    assert pool.run(_many, number) == [(1, list(range(pool.size)))] * pool.size


LATE = """
import time
from unittest import mock
import matex_data as md
from matex_data.mpi.communicator import Communicator

rank, size, _ = md.training.world()
split = Communicator.split

def late(self, *arguments):
    if rank == size - 1:
        time.sleep(60)
    return split(self, *arguments)

with mock.patch.object(Communicator, "split", late):
    md.training.Mesh(model=size)
print("end")
"""


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_never_makes_its_mesh_is_an_error_in_seconds(size: int) -> None:
    done = run_script(size, LATE, env={"MATEX_TIMEOUT": "3"}, timeout=60)
    assert done.returncode != 0 and done.seconds < scaled(40)
    assert "another rank does not take part" in done.stderr and f"rank {size - 1} is at" in done.stderr, done.stderr
    assert "end" not in done.stdout


def _mesh_of(comm, by_rank):
    Mesh(**by_rank[comm.rank], comm=comm)


@pytest.mark.rank_counts(2)
@pytest.mark.parametrize(
    ("by_rank", "text"),
    [
        ([{"model": 3}] * 2, r"expected: a multiple of stages \* model = 1 \* 3 ranks\n  found: 2 ranks"),
        ([{"stages": 0}] * 2, "cannot be arranged"),
        ([{"model": 1}, {"model": 2}], "different meshes(.|\n)*model=1(.|\n)*model=2"),
    ],
)
def test_meshes_that_cannot_be_raise_the_same_error_on_all_ranks(pool: Pool, by_rank: list, text: str) -> None:
    errors = pool.outcomes(_mesh_of, by_rank)
    assert [type(error) for error in errors] == [PartitionError] * 2
    assert str(errors[0]) == str(errors[1])
    with pytest.raises(PartitionError, match=text):
        raise errors[0]


def test_a_layout_map_is_one_of_keras() -> None:
    layouts = Mesh().layout_map()
    assert isinstance(layouts, keras.distribution.LayoutMap)
    assert keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="data").num_model_replicas == 1
    layouts["up.*/kernel"] = (None, "model")
    assert layouts["up_1/kernel"].axes == (None, "model")
    with pytest.raises(ValueError, match="Invalid axis names"):
        layouts["down.*/kernel"] = ("columns", None)
