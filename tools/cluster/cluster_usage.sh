#!/usr/bin/env bash
# GPU hours by user and account:    bash tools/cluster/cluster_usage.sh [START] [END]      (2025-01-01 to now)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=python3
[ ! -x .venv/bin/python ] || python=.venv/bin/python
exec "$python" slurm/monitor.py --usage "${1:-2025-01-01}" "${2:-now}"
