"""The MPI library."""

from mpi4py import MPI as MPI
