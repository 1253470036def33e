#!/usr/bin/env bash
# Nodes, GPUs and jobs of the cluster now:    bash tools/cluster/cluster_status.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=python3
[ ! -x .venv/bin/python ] || python=.venv/bin/python
exec "$python" slurm/monitor.py --cluster "$@"
