#!/bin/bash
# Publish all checkpoints of an experiment, as SLURM jobs or one after the other:
#     huggingface/batch_submit_checkpoints.sh EXPERIMENT [ORG] [--help]
set -euo pipefail

root=$(cd "$(dirname "$(readlink -f "$0")")/.." && pwd)
python=$(command -v python3)
if [ -x "$root/.venv/bin/python" ]; then
    python=$root/.venv/bin/python
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" "$root/slurm/run_module.py" megatron.jobs.publishing "$@"
