#!/bin/sh
# One run on several machines: Open MPI starts the processes, JAX finds them by itself.
#
# Start it on the first machine of HOSTS. Started again it goes on with the run, wherever that was
# stopped or killed, and it says so when there is nothing left to do.

# The three lines to change, here or in the environment:
: "${HOSTS:=node1:8,node2:8}"          # machine:processes, one process for each GPU; this one first
: "${RUN_DIR:=/shared/runs/digits}"    # on a disk that all machines see
: "${TRAIN:=digits --towers 16}"       # what to train

# Seconds for the last checkpoint. Open MPI 4 waits so long before it passes SIGTERM on, and as long
# again before SIGKILL: so a job whose process has died takes twice as long to end.
: "${GRACE_S:=15}"

# What is no terminal gets plain lines; Open MPI shows each process a terminal in any case.
if [ -t 1 ]; then TTY_COMPATIBLE=1; else TTY_COMPATIBLE=0; fi
export TTY_COMPATIBLE

# --bind-to none: by default a process would get one core, or share one socket's.
# The Python is this machine's `python`: a virtual environment on a disk that all machines see.
# shellcheck disable=SC2086  # the words of $TRAIN are words of the command
exec mpirun --host "$HOSTS" --bind-to none --mca odls_base_sigkill_timeout "$GRACE_S" \
  -x PATH -x TTY_COMPATIBLE \
  "$(command -v python)" -m multitower train $TRAIN \
  --distributed --run-dir "$RUN_DIR" --resume auto "$@"
