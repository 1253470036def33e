#!/usr/bin/env bash
# The tests that need a GPU, on a machine that has one:  bash tests/gpu/run.sh [pytest arguments]
# Uses .venv if there is one, else the python3 on the PATH (with the packages of requirements/).
#   WHEELS=folder   first install the wheels in it, for a machine without network that lacks some package
#   RESULTS=folder  also leave the tests' output there, as gpu_tests.txt
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
if [ -n "${WHEELS:-}" ]; then
    site=$(mktemp -d)
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$WHEELS"/*.whl
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
"$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' || {
    echo "error: torch sees no GPU here" >&2
    exit 2
}
# Several at a time: most of each test is starting and compiling.
workers=()
"$python" -c 'import xdist' 2>/dev/null && workers=(-n 6)
# Only files with such tests: others may need packages that a GPU machine need not have.
mapfile -t files < <(grep -rl --include='test_*.py' 'mark\.gpu' tests)
run() { "$python" -m pytest "${files[@]}" -m gpu -p no:cacheprovider --timeout 150 --tb=short ${workers[@]+"${workers[@]}"} "$@"; }
[ -n "${RESULTS:-}" ] || { run "$@"; exit; }
mkdir -p "$RESULTS"
run "$@" 2>&1 | tee "$RESULTS/gpu_tests.txt"
