"""One GPU for each rank of a machine, and TensorFlow's own collectives: a runtime that spans all ranks."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import socket
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import tensorflow as tf

from matex_data import machine
from matex_data.errors import PartitionError
from matex_data.machine import RankAndSize
from matex_data.mpi.addresses import LOOPBACK, addresses
from matex_data.mpi.addresses import machine as machine_name
from matex_data.mpi.communicator import Equal
from matex_data.mpi.deadlines import waiting_for
from matex_data.mpi.library import MPI
from matex_data.mpi.node import local_rank
from matex_data.training import keras_api
from matex_data.training.comm.channel import Channel, open_channel

log = logging.getLogger("matex_data.training")

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""Environment variables by which schedulers and users assign GPUs to a process."""


def count_gpus() -> int:
    """Return the number of GPUs that TensorFlow sees."""
    return len(tf.config.list_physical_devices("GPU"))


def choose_gpu(local: RankAndSize, gpus: int, assigned: bool) -> int | None:
    """Return the number of the GPU that a rank takes; None to leave the choice to TensorFlow.

    Parameters
    ----------
    assigned : a scheduler or the user has chosen what this process sees; a single GPU then is that of this rank.
    """
    if local.size == 1 or not gpus or (gpus == 1 and assigned):
        return None
    return local.rank % gpus


def take_own_gpu(local: RankAndSize, rank: int) -> None:
    """Make one GPU visible to TensorFlow on this rank, which allocates its memory by and by.

    Call it before anything else that starts TensorFlow's runtime, such as a variable or a tensor. It does nothing on a
    machine with one rank or without a GPU, nor where the script or a scheduler has chosen before.

    Parameters
    ----------
    rank : rank in the job; rank 0 reports ranks that share a GPU.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if tf.config.get_visible_devices("GPU") != gpus:
        return
    number = choose_gpu(local, len(gpus), any(name in os.environ for name in _VISIBLE))
    if number is None:
        return
    try:
        tf.config.set_visible_devices(gpus[number], "GPU")
        for gpu in gpus:  # all alike, since the script may choose others
            tf.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError:
        log.warning(
            "rank %d cannot take a GPU of its own: TensorFlow has started with %d of them before\n"
            "  remedy: let nothing create tensors or variables before matex run, or set CUDA_VISIBLE_DEVICES",
            *(rank, len(gpus)),
        )
        return
    if rank == 0 and local.size > len(gpus):
        log.warning(
            "%d ranks on %s share %d GPUs: each takes one, and allocates its memory by and by\n"
            "  remedy: start as many ranks on a machine as it has GPUs",
            *(local.size, platform.node(), len(gpus)),
        )


def gpu_address() -> str | None:
    """Return machine and PCI address of the GPU that TensorFlow computes on; None if there is none, or CUDA is absent.

    The slices of a GPU (MIG) have one address.
    """
    visible = tf.config.get_visible_devices("GPU")
    if not visible:
        return None
    device, address = ctypes.c_int(), ctypes.create_string_buffer(32)
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = tf.config.list_physical_devices("GPU").index(visible[0])
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), number):
        return None
    if cuda.cuDeviceGetPCIBusId(address, len(address), device):
        return None
    return f"{address.value.decode()} {machine_name()}"


@functools.cache
def warn_of_shared_gpu(rank: int) -> None:
    """Warn once, on rank 0, if all ranks of this machine train on the same GPU though there are others.

    Without ``matex run`` TensorFlow has started before this package could choose a GPU.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if rank == 0 and machine.local_size() > 1 and len(gpus) > 1 and tf.config.get_visible_devices("GPU") == gpus:
        log.warning(
            "each of the %d ranks on %s sees %d GPUs and trains on the first one\n"
            "  remedy: start the script with matex run; or call, before anything that creates tensors or variables, "
            'tf.config.set_visible_devices(gpus[matex_data.training.world().local_rank], "GPU") with '
            'gpus = tf.config.list_physical_devices("GPU")',
            *(machine.local_size(), platform.node(), len(gpus)),
        )


Choice = Literal["auto", "mpi", "tensorflow"]
CHOICES = get_args(Choice)
VARIABLE = "MATEX_COLLECTIVES"
GROUP = 0x6D6178
"""Key of the group of all ranks; TensorFlow's own strategies count theirs from 1."""
PROBED, PROBE_SECONDS = 1 << 12, 60.0
"""Elements of the first sum, which is compared with the known one, and seconds that it may take."""
REMEDY = (
    f"start the script with matex run --collectives tensorflow; or set {VARIABLE}=tensorflow, and import "
    "matex_data.training before anything creates tensors or variables"
)


@dataclass(frozen=True)
class Runtime:
    """Collectives of TensorFlow on one device of each rank.

    Parameters
    ----------
    device : "CPU:0", or "GPU:0".
    hint : TensorFlow's name of the implementation: "nccl", or "ring".
    required : chosen by the user, so that what it cannot do is an error.
    """

    ranks: int
    device: str
    hint: str
    required: bool

    def sum(self, tensor: Any, name: str, seconds: float = 0.0) -> Any:
        """Return the sum of a tensor over all ranks. *Collective*, in the same order on all ranks.

        Parameters
        ----------
        tensor : floats of a static shape, with at least one element.
        name : of the operation, with the shape and dtype of the tensor; the same on all ranks.
        seconds : that it may take; 0: without limit.
        """
        key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little") >> 1
        with tf.device(self.device):
            return tf.raw_ops.CollectiveReduceV2(
                input=tensor,
                group_size=self.ranks,
                group_key=GROUP,
                instance_key=key,
                ordering_token=[],
                merge_op="Add",
                final_op="Id",
                communication_hint=self.hint,
                timeout_seconds=seconds,
            )

    def is_right(self, rank: int) -> bool:
        """Return whether the sum of known vectors is right on this rank. *Collective*."""
        numbers = np.arange(PROBED, dtype=np.float32)
        try:
            total = self.sum(tf.constant(numbers * (rank + 1)), f"probe of {PROBED}", PROBE_SECONDS)
            return bool((total.numpy() == numbers * (self.ranks * (self.ranks + 1) // 2)).all())
        except tf.errors.OpError as error:
            log.warning("rank %d: the first sum by TensorFlow's collectives has failed: %s", rank, error)
            return False


_started: list[Runtime] = []
"""The runtime of this process, once all ranks have it."""


def start(choice: str) -> None:
    """Choose a GPU for each rank, and start TensorFlow's collectives where they are chosen. *Collective*.

    Call it before anything else that starts TensorFlow's runtime.

    Parameters
    ----------
    choice : "tensorflow"; "mpi"; or "auto": TensorFlow's if each rank has another physical GPU, and sums are right.

    Raises
    ------
    PartitionError : on all ranks, if this is none of the choices, or if "tensorflow" is not possible.
    """

    channel = open_channel(None)
    take_own_gpu(local_rank(channel.user), channel.rank)
    problem = "the ranks choose different collectives"
    channel.communicator.agreed(lambda: _check(choice), Equal({"collectives": choice}, problem, f"set one {VARIABLE}"))
    if channel.size == 1 or choice == "mpi" or _started:
        return
    gpus = channel.communicator.allgather(gpu_address())
    own_gpus = None not in gpus and len(set(gpus)) == len(gpus)
    if choice == "auto" and not own_gpus:
        if any(gpus):
            _say_mpi(channel.rank, "not every rank has a GPU of its own")
        return
    keras_api.check(channel.rank, channel.size, keras_api.COLLECTIVES)
    late = channel.host.allgather_object(keras_api.tensorflow_has_started())
    if any(late):
        error = _late(f"on rank {late.index(True)}, TensorFlow has started before {VARIABLE} was read")
        _give_up(channel.rank, choice, error)
        return
    device = "GPU:0" if any(gpus) else "CPU:0"
    runtime = Runtime(channel.size, device, "nccl" if own_gpus else "ring", required=choice == "tensorflow")
    _connect(channel)
    (wrong,) = channel.communicator.maximum(not runtime.is_right(channel.rank))
    _leave_threads(channel.rank)
    if not wrong:
        _started.append(runtime)
        return
    error = PartitionError(
        "a sum by TensorFlow's collectives is wrong, or late",
        expected=f"the sum of known vectors on each of {channel.size} ranks within {PROBE_SECONDS:g} s",
        found=f'another one, or none, with the hint "{runtime.hint}"',
        remedy=f"leave out --collectives and {VARIABLE}, so that gradients are reduced by MPI; messages of TensorFlow "
        "above may tell why",
    )
    _give_up(channel.rank, choice, error)


def runtime_of(channel: Channel, choice: str, strategy: str) -> Runtime | None:
    """Return the runtime that averages gradients over the ranks of a channel; None if MPI does.

    Parameters
    ----------
    choice : as of ``fit``.
    strategy : of communication; TensorFlow's collectives run as one chain alone.

    Raises
    ------
    PartitionError : TensorFlow's collectives are required, and are not possible.
    """
    if choice == "mpi" or channel.size == 1:
        return None
    runtime = _started[0] if _started else None
    if runtime is None and choice == "tensorflow":
        raise _late("a process without them, in which TensorFlow may have started already")
    if runtime is None:
        return None
    whole = channel.user.size == MPI.COMM_WORLD.size
    if whole and strategy == "chained":
        return runtime
    if choice == "tensorflow" or (runtime.required and strategy != "chained"):
        raise PartitionError(
            "TensorFlow's collectives reduce over all ranks of the job, one bucket after the other",
            expected='all ranks, and strategy="chained"',
            found=f"{channel.size} of {MPI.COMM_WORLD.size} ranks, strategy={strategy!r}",
            remedy='give collectives="mpi", or leave out comm=, mesh= and strategy=',
        )
    return None


def _check(choice: str) -> None:
    """Raise ``PartitionError`` if there is no such choice."""
    if choice not in CHOICES:
        raise PartitionError(
            "there are no such collectives",
            expected=f"collectives= or {VARIABLE}: one of {', '.join(CHOICES)}",
            found=choice,
        )


def _connect(channel: Channel) -> None:
    """Start the runtime of TensorFlow that spans the ranks. *Collective*."""
    with socket.socket() as reserved:  # TensorFlow's server opens its socket itself: until then the port is free
        reserved.bind(("", 0))
        own = machine_name(), addresses()[0], reserved.getsockname()[1]
        of_ranks = channel.communicator.allgather(own)
    one = len({name for name, _, _ in of_ranks}) == 1
    workers = [f"{LOOPBACK if one else host}:{port}" for _, host, port in of_ranks]
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": workers}), task_type="worker", task_id=channel.rank, rpc_layer="grpc"
    )
    with waiting_for(channel.communicator.liveness):
        tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)


def _leave_threads(rank: int) -> None:
    """Let a script that sets numbers of threads go on, which TensorFlow refuses once it has started."""

    def leave(num_threads: int) -> None:
        if rank == 0:
            log.warning(
                "the number of threads stays as it is, since TensorFlow has started for the collectives of all ranks\n"
                "  remedy: set TF_NUM_INTEROP_THREADS and TF_NUM_INTRAOP_THREADS=%d, or choose --collectives mpi",
                num_threads,
            )

    for name in ("set_inter_op_parallelism_threads", "set_intra_op_parallelism_threads"):
        setattr(tf.config.threading, name, leave)


def _late(found: str) -> PartitionError:
    return PartitionError(
        "TensorFlow's collectives have to be there before TensorFlow's first tensor",
        expected=f'{VARIABLE}=tensorflow, or matex run --collectives tensorflow, for collectives="tensorflow"',
        found=found,
        remedy=REMEDY,
    )


def _give_up(rank: int, choice: str, error: PartitionError) -> None:
    """Raise an error, the same on all ranks, or say once that MPI reduces."""
    if choice == "tensorflow":
        raise error
    _say_mpi(rank, str(error))


def _say_mpi(rank: int, reason: str) -> None:
    if rank == 0:
        log.warning("gradients are reduced by MPI: %s", reason)
