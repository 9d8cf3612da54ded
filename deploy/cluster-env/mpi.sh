#!/bin/bash
# One launcher on each host of a list: ./mpi.sh HOST... The first host serves the store.
# Open MPI (the default), or MPI=hydra for MPICH and Intel MPI.
set -eu
export MASTER_ADDR=$1
export MASTER_PORT=${MASTER_PORT:-23456}
hosts=$(IFS=,; printf '%s' "$*")
train=(python -m edl.launch --nproc-per-node=2 train.py)

case ${MPI:-openmpi} in
    openmpi) exec mpirun --host "$hosts" -np $# --map-by ppr:1:node --bind-to none \
        -x MASTER_ADDR -x MASTER_PORT "${train[@]}" ;;
    hydra) exec mpiexec.hydra -hosts "$hosts" -n $# -ppn 1 "${train[@]}" ;;
    *) echo "MPI=$MPI: openmpi or hydra" >&2; exit 2 ;;
esac
