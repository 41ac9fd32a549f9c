#!/bin/bash
# Train a script with matex_data under PBS. A job that comes to its time limit saves and submits itself again, and goes on
# with the next batch:
#     qsub -v SCRIPT=train.py docs/clusters/pbs.sh
#PBS -N train
#PBS -l select=2:ncpus=4:mpiprocs=4
#PBS -l walltime=04:00:00
#PBS -r y

WALLTIME=${WALLTIME:-14400}                 # seconds, as above
export MATEX_END_TIME=${MATEX_END_TIME:-$(($(date +%s) + WALLTIME))}
cd "${PBS_O_WORKDIR:-.}" || exit 1
PYTHON=${PYTHON:-.venv/bin/python}
CHECKPOINT=${CHECKPOINT:-checkpoints/${PBS_JOBID%%.*}}

# The site's mpiexec, with a rank for each line of PBS_NODEFILE.
"$PYTHON" -m matex_data run -n auto --checkpoint "$CHECKPOINT" $SCRIPT
code=$?
if [ $code -eq 75 ]; then                   # saved, to be started again
    qsub -v "SCRIPT=$SCRIPT,CHECKPOINT=$CHECKPOINT" "${JOB:-docs/clusters/pbs.sh}"   # $0 is a copy of PBS
fi
exit $code
