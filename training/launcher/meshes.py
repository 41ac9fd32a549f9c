"""Distributions of scripts: devices of ``keras.distribution`` are ranks, strategies of ``tf.distribute`` one replica.

On TensorFlow, Keras itself accepts a distribution and trains whole weights.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from matex_data.errors import PartitionError
from matex_data.training.comm.channel import Channel
from matex_data.training.keras_api import keras_distribution
from matex_data.training.launcher.root import say_once
from matex_data.training.model_parallel.mesh import AXES, Mesh


def patch_distributions(channel: Channel, use: Callable[[Mesh], None]) -> None:
    """Make ``keras.distribution`` distribute over the ranks.

    Parameters
    ----------
    use : cuts models over the ranks of a mesh from then on.
    """
    current: list[Any] = [None]

    def list_devices(device_type: str | None = None) -> list[str]:
        return [f"{device_type or 'cpu'}:{rank}".lower() for rank in range(channel.size)]

    def get_device_count(device_type: str | None = None) -> int:
        return channel.size

    def set_distribution(value: Any) -> None:
        if value is not None and value is not current[0] and not isinstance(value, keras.distribution.DataParallel):
            use(mesh_of(value, channel))
        elif value is None and isinstance(current[0], keras.distribution.ModelParallel):
            raise PartitionError(
                "a distribution of models cannot end within a script",
                expected="keras.distribution.set_distribution(ModelParallel(...)) at the beginning",
                found="set_distribution(None), or the end of a scope()",
                remedy="leave out the end; the model is whole after each fit",
            )
        current[0] = value

    @contextlib.contextmanager
    def scope(distribution: Any) -> Iterator[None]:
        set_distribution(distribution)
        yield  # models that are built here train later

    for name, function in (
        ("list_devices", list_devices),
        ("get_device_count", get_device_count),
        ("set_distribution", set_distribution),
        ("distribution", lambda: current[0]),
    ):
        for owner in (keras.distribution, keras_distribution):
            setattr(owner, name, function)
    keras_distribution.Distribution.scope = scope


def mesh_of(distribution: Any, channel: Channel) -> Mesh:
    """Return the mesh of ranks for a ``keras.distribution.ModelParallel``. *Collective*.

    Raises
    ------
    PartitionError : on all ranks, if it is of another kind, or its mesh has other axes than one of the batch and one of
        the model.
    """
    if not isinstance(distribution, keras.distribution.ModelParallel):
        raise PartitionError(
            "this kind of distribution does not exist on ranks",
            expected="keras.distribution.DataParallel or ModelParallel",
            found=type(distribution).__name__,
            remedy="use one of these",
        )
    devices, batch = distribution.device_mesh, distribution.batch_dim_name
    names = [name for name in devices.axis_names if name != batch]
    sizes = dict(zip(devices.axis_names, devices.shape, strict=True))
    if len(names) != 1 or devices.devices.size != channel.size:
        raise PartitionError(
            "this device mesh does not fit the ranks",
            expected=f"two axes, of the batch and of the model, with {channel.size} devices in all",
            found=f"{sizes}, of which {batch!r} is that of the batch",
            remedy="make it of keras.distribution.list_devices(), which has one device for each rank",
        )
    mesh = Mesh(model=sizes[names[0]], comm=channel.user)
    layouts, given = mesh.layout_map(), distribution._layout_map
    for key in given:
        axes = given[key].axes
        if batch in axes:
            raise PartitionError(
                "a layout cuts a variable over the replicas",
                field=key,
                expected=f"axes {names[0]!r} and None",
                found=axes,
                remedy="name the axis of the model alone",
            )
        layouts[key] = tuple(AXES[2] if axis == names[0] else None for axis in axes)
    return mesh


ONE_REPLICA = ("MirroredStrategy", "MultiWorkerMirroredStrategy", "OneDeviceStrategy", "CentralStorageStrategy")


def patch_strategies(channel: Channel) -> None:
    """Replace the strategies that train synchronously themselves; warn at the first use."""

    class OneReplica:  # a class, since Keras calls isinstance with it
        def __new__(cls, *_: Any, **__: Any) -> Any:
            text = "%s: each rank is one replica; gradients are averaged over the ranks"
            say_once(channel.rank, text, cls.__name__)
            return tf.distribute.get_strategy()

    for name, owner in itertools.product(ONE_REPLICA, (tf.distribute, tf.distribute.experimental)):
        if hasattr(owner, name):
            setattr(owner, name, type(name, (OneReplica,), {}))
