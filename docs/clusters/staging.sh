#!/bin/bash
# Copy the data to a disk of each node before training:
#     sbatch docs/clusters/staging.sh /project/events train.py
# The script finds the data in the folder that the variable DATA names. Copies keep their times (cp -p), by which ranks
# recognize the files of one data set.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=04:00:00

PYTHON=${PYTHON:-.venv/bin/python}
MPI=${MPI:-pmi2}
SOURCE=$1
shift
export DATA=${LOCAL:-/tmp}/$SLURM_JOB_ID

srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --mpi=none cp -rp "$SOURCE" "$DATA" || exit 1
srun -K1 --mpi="$MPI" "$PYTHON" "$@"
code=$?
srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --mpi=none rm -rf "$DATA"
exit $code
