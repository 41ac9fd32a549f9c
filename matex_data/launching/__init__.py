"""The launchers of this machine, the MPI library that mpi4py loads, and the command that starts ranks."""
