#!/usr/bin/env bash
# The tests that need a GPU, on a machine that has one:  bash tests/gpu/run.sh [pytest arguments]
# Uses .venv if there is one, else the python3 on the PATH (with the packages of requirements/).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
"$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' || {
    echo "error: torch sees no GPU here" >&2
    exit 2
}
exec "$python" -m pytest tests -m gpu -p no:cacheprovider --timeout 300 "$@"
