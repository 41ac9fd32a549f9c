"""One GPU for each rank of a machine."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform

import tensorflow as tf

from matex_data import machine
from matex_data.machine import RankAndSize
from matex_data.mpi.addresses import machine as machine_name

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
    local : rank and number of ranks on this machine.
    gpus : number of GPUs that this process sees.
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
    local : rank and number of ranks on this machine.
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
