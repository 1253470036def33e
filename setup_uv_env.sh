#!/usr/bin/env bash
# The environment of `make venv`, made with uv (faster, and brings its own Python), for x86-64 and Arm (GH200) hosts.
set -euo pipefail

usage='usage: bash setup_uv_env.sh [--cpu | --cuda VERSION] [--runtime] [FEATURE ...]

  --cpu            the CPU build of torch, the smallest
  --cuda VERSION   a CUDA build: cu126, cu130, ...; auto looks at the driver. Needed on Arm, where the package index
                   has a CPU build. Without either: what the package index (or TORCH_INDEX) has
  --runtime        without what only tests and checks need
  FEATURE          also requirements/requirements-FEATURE.txt: flashattention, transformerengine, mamba, ... They
                   compile for up to an hour, and need a compute node with the CUDA toolkit:
                   sbatch slurm/run_on_compute.sbatch bash setup_uv_env.sh --cuda auto flashattention

Environment variables: VENV (.venv), PYTHON_VERSION (3.12), TORCH_INDEX (an address of torch wheels). The index and the
folders of wheels that pip is configured with are used too. Run again, it installs what is missing.'

fail() {
    echo "error: $1" >&2
    exit 2
}

cd "$(dirname "${BASH_SOURCE[0]}")"
torch=()
parts=(-r requirements/requirements.txt)
development=(-r requirements/requirements-dev.txt)
features=()
while [ $# -gt 0 ]; do
    case $1 in
    -h | --help)
        echo "$usage"
        exit 0
        ;;
    --cpu) torch=(--torch-backend cpu) ;;
    --cuda)
        [[ ${2:-} =~ ^(auto|cu[0-9]+)$ ]] || fail "--cuda wants auto or a version such as cu130, not '${2:-}'"
        torch=(--torch-backend "$2")
        shift
        ;;
    --runtime) development=() ;;
    -*) fail "no such option: $1. $usage" ;;
    *)
        if [ ! -f "requirements/requirements-$1.txt" ]; then
            there=(requirements/requirements-*.txt)
            there=("${there[@]#requirements/requirements-}")
            fail "no such feature: $1. There are: ${there[*]%.txt}"
        fi
        features+=("$1")
        ;;
    esac
    shift
done
command -v uv >/dev/null || fail "uv is not installed (pip install uv). 'make venv' needs no uv."

# uv does not read pip's configuration, where a site names its mirror and its folders of wheels.
pip_setting() {
    python3 -m pip config get "global.$1" 2>/dev/null || true
}
UV_FIND_LINKS=${UV_FIND_LINKS:-$(tr -s ' \n' ',' <<<"${PIP_FIND_LINKS:-$(pip_setting find-links)}" | sed 's/,$//')}
UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-${PIP_INDEX_URL:-$(pip_setting index-url)}}
export UV_FIND_LINKS UV_DEFAULT_INDEX
[ -n "$UV_FIND_LINKS" ] || unset UV_FIND_LINKS
[ -n "$UV_DEFAULT_INDEX" ] || unset UV_DEFAULT_INDEX
[ -z "${TORCH_INDEX:-}" ] || torch=(--extra-index-url "$TORCH_INDEX" --index-strategy unsafe-best-match)

VENV=${VENV:-.venv}
[ -x "$VENV/bin/python" ] || uv venv --seed --python "${PYTHON_VERSION:-3.12}" "$VENV"
install=(uv pip install --python "$VENV/bin/python")

"${install[@]}" "${torch[@]}" "${parts[@]}" "${development[@]}"
"${install[@]}" --no-build-isolation --no-deps -e .
"$VENV/bin/python" tools/check_environment.py --mend
# These compile against the installed torch, so they are built without isolation.
for feature in "${features[@]}"; do
    "${install[@]}" "${torch[@]}" --no-build-isolation -r "requirements/requirements-$feature.txt"
done
echo "activate it with: source $VENV/bin/activate"
