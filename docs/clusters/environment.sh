#!/bin/bash
# Unpack a Python environment on each node, so that its thousands of small files do not burden the shared file system.
# Once, on a login node, at the path where the environment will be used:
#     python -m venv /tmp/environment && /tmp/environment/bin/pip install '.[all]'
#     tar --create --file environment.tar --directory /tmp environment
# In each job: docs/clusters/environment.sh environment.tar, then PYTHON=/tmp/environment/bin/python.
set -euo pipefail
ARCHIVE=$1
TARGET=${TARGET:-/tmp}

srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --mpi=none tar --extract --file "$ARCHIVE" --directory "$TARGET"
