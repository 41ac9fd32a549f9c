#!/bin/bash
# Train one script with several settings, each in a job of its own that is started again like that of slurm.sh:
#     sbatch --array=1-8 docs/clusters/array.sh train.py
# The script gets the number of its job as its last argument.
#SBATCH --job-name=settings
#SBATCH --array=1-2
#SBATCH --ntasks=2
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@180

PYTHON=${PYTHON:-.venv/bin/python}
CHECKPOINTS=${CHECKPOINTS:-checkpoints}

"$PYTHON" -m matex_data run -n auto --checkpoint "$CHECKPOINTS/$SLURM_ARRAY_JOB_ID-$SLURM_ARRAY_TASK_ID" \
    "$@" "$SLURM_ARRAY_TASK_ID"
code=$?
if [ $code -eq 75 ]; then
    scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
fi
exit $code
