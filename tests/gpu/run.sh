#!/usr/bin/env bash
# What needs a GPU, on a machine that has one: the tests, then tools/bench/gpu.py in the time that they leave.
#   bash tests/gpu/run.sh [pytest arguments]
# Uses .venv if there is one, else the python3 on the PATH (with the packages of requirements/). Needs no network,
# once WHEELS is there.
#   WHEELS=folder   wheels of what this Python lacks if it has no DeepSpeed, installed for this run only; made by
#                   tests/gpu/wheels.sh, here if the folder is missing (default build/gpu-wheels)
#   RESULTS=folder  gpu_tests.txt, gpu_bench.md and gpu_bench.json, written as results come (default gpu-results)
#   LIMIT=480       seconds for all of it: less than half for the tests
#   BENCH=          what tools/bench/gpu.py gets besides, or "no" for the tests alone
#   DEEPY_GPU_TESTS_ON=cpu  a trial without a GPU: the tests that can run there, and the benchmark of tiny models
# Exits with 2 where torch sees no GPU, else with 1 if a test failed, the limit cut the tests off or there are no wheels.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
case ${1:-} in -h | --help) sed -n '2,12s/^# //p' tests/gpu/run.sh; exit 0 ;; esac
python=.venv/bin/python
[ -x "$python" ] || python=python3
trial=
[ "${DEEPY_GPU_TESTS_ON:-}" != cpu ] || trial=--shrink
why=$("$python" -c 'import torch, sys; sys.exit(not (sys.argv[1] or torch.cuda.is_available()))' "$trial" 2>&1) || {
    echo "error: torch sees no GPU here${why:+: ${why##*$'\n'}}" >&2
    exit 2
}
results=${RESULTS:-gpu-results} limit=${LIMIT:-480} wheels=${WHEELS:-build/gpu-wheels}
mkdir -p "$results"
if ! "$python" -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("deepspeed"))'; then
    [ -f "$wheels/content.txt" ] || bash tests/gpu/wheels.sh "$wheels" || exit 1 # 2 would say: no GPU
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$wheels"/*.whl
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi

# Several at a time, because most of each test is starting and compiling; in this order, one by one.
workers=()
"$python" -c 'import xdist' 2>/dev/null && workers=(-n 6 --maxschedchunk 1)
# Only files with such tests, because others may need packages that a GPU machine need not have. Whole runs first.
files=(tests/gpu/test_training.py)
mapfile -t others < <(grep -rl --include='test_*.py' --exclude=test_training.py 'mark\.gpu' tests | sort)
failed=0
TORCHINDUCTOR_COMPILE_THREADS=4 timeout --signal=INT --kill-after=20 $((limit * 45 / 100)) \
    "$python" -m pytest "${files[@]}" "${others[@]}" -v -m gpu -p no:cacheprovider --timeout 150 --tb=short --durations=10 \
    ${workers[@]+"${workers[@]}"} "$@" 2>&1 | tee "$results/gpu_tests.txt" || failed=1

if [ "${BENCH:-}" != no ]; then
    # A row that has begun may take 40 seconds more than --seconds.
    read -ra more <<<"${BENCH:-}"
    seconds=$((limit - SECONDS - 45))
    if [ "$seconds" -gt 20 ]; then
        timeout --kill-after=5 $((seconds + 44)) "$python" tools/bench/gpu.py --seconds "$seconds" --results "$results" \
            ${trial:+"$trial"} ${more[@]+"${more[@]}"} || failed=1
    else
        echo "tools/bench/gpu.py: no time left of $limit s" >&2
    fi
fi
echo "results in $results after $SECONDS s"
exit "$failed"
