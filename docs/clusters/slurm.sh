#!/bin/bash
# Train a script with matex_data under Slurm; a job that is preempted, or comes to its time limit, is started again and
# goes on with the next batch:
#     sbatch --nodes=2 --ntasks-per-node=4 docs/clusters/slurm.sh train.py --epochs 100
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@180

PYTHON=${PYTHON:-.venv/bin/python}          # of an environment that all nodes see, or have a copy of
MPI=${MPI:-pmi2}                            # pmi2 for MPICH, pmix for Open MPI: srun --mpi=list
CHECKPOINT=${CHECKPOINT:-checkpoints/$SLURM_JOB_ID}

# -K1 ends all ranks when one fails. USR1 goes to the ranks 180 s before the time limit; scancel --signal=USR1 sends it
# at any time. Slurm itself sends TERM before it preempts or requeues.
srun -K1 --mpi="$MPI" "$PYTHON" -m matex_data run --checkpoint "$CHECKPOINT" "$@"
code=$?
if [ $code -eq 75 ]; then                   # saved, to be started again
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
