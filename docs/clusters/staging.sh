#!/bin/bash
# Copy the data to a disk of each node before training:
#     sbatch docs/clusters/staging.sh /project/events train.py
# The script finds the data in the folder that the variable DATA names. cp -p keeps the times of the files, by which a
# stored index recognizes them.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=04:00:00

PYTHON=${PYTHON:-.venv/bin/python}
SOURCE=$1
shift
export DATA=${LOCAL:-/tmp}/$SLURM_JOB_ID
ON_EACH_NODE="srun --ntasks=$SLURM_NNODES --ntasks-per-node=1 --mpi=none"

$ON_EACH_NODE cp -rp "$SOURCE" "$DATA" || exit 1
"$PYTHON" -m matex_data run -n auto "$@"
code=$?
$ON_EACH_NODE rm -rf "$DATA"
exit $code
