#!/usr/bin/env bash
# Train over several machines with torchrun. Call it on every machine with the same arguments, except for the
# number of the machine, which is 0 on the machine with the given address:
#
#     ./torchrun.sh RUN.toml ADDRESS NUM_MACHINES MACHINE [--set TABLE.KEY=VALUE ...]
#
# PROCESSES is the number of processes per machine, 2 by default: one per GPU, or any number on a CPU. Called
# again with the same arguments, the run resumes. log.folder must be a folder that all machines share.
set -euo pipefail

if [ "$#" -lt 4 ]; then
    echo "usage: $0 RUN.toml ADDRESS NUM_MACHINES MACHINE [--set TABLE.KEY=VALUE ...]" >&2
    exit 2
fi
run=$1 address=$2 machines=$3 machine=$4
shift 4
name=$(basename "$run" .toml)

exec torchrun \
    --nnodes "$machines" \
    --node-rank "$machine" \
    --nproc-per-node "${PROCESSES:-2}" \
    --master-addr "$address" \
    --master-port "${PORT:-29500}" \
    --max-restarts 3 \
    --no-python bireme train "$run" --set "log.name=$name" "$@"
