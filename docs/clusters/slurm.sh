#!/bin/bash
# Train a script with matex_data under Slurm. A job that is preempted, or comes to its time limit, saves, is queued again, and
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
CHECKPOINT=${CHECKPOINT:-checkpoints/$SLURM_JOB_ID}

# Ranks get USR1 180 s before the time limit, and whenever somebody calls scancel --signal=USR1; before it requeues or
# preempts a job, Slurm sends TERM. Each of these saves. Slurm 22.05 does not tell jobs when they end: with the time that
# squeue tells, the ranks save earlier where a save takes long.
export MATEX_END_TIME=${SLURM_JOB_END_TIME:-$(date -d "$(squeue -h -j "$SLURM_JOB_ID" -o %e)" +%s)}

# srun with the --mpi that fits, and with -K1, by which all ranks end when one fails.
"$PYTHON" -m matex_data run -n auto --checkpoint "$CHECKPOINT" "$@"
code=$?
if [ $code -eq 75 ]; then                   # saved, to be started again
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
