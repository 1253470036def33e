#!/usr/bin/env bash
# The environment of `make venv`, made with uv (faster, and brings its own Python), for x86-64 and Arm (GH200) hosts.
#
#   bash setup_uv_env.sh                       .venv with requirements.txt and requirements-dev.txt
#   bash setup_uv_env.sh flashattention mamba  plus requirements/requirements-<name>.txt of each name
#
# PYTHON_VERSION (3.12), VENV (.venv), TORCH_INDEX (e.g. https://download.pytorch.org/whl/cu130) can be set.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

command -v uv >/dev/null || {
    echo "error: uv is not installed (pip install uv); `make venv` needs no uv" >&2
    exit 2
}
for name in "$@"; do
    [ -f "requirements/requirements-$name.txt" ] || {
        echo "error: no such feature: $name. There are: $(ls requirements | sed -n 's/requirements-\(.*\)\.txt/\1/p' | tr '\n' ' ')" >&2
        exit 2
    }
done

VENV=${VENV:-.venv}
[ -x "$VENV/bin/python" ] || uv venv --python "${PYTHON_VERSION:-3.12}" "$VENV"
install=(uv pip install --python "$VENV/bin/python")
[ -n "${TORCH_INDEX:-}" ] && install+=(--extra-index-url "$TORCH_INDEX" --index-strategy unsafe-best-match)

"${install[@]}" -r requirements/requirements.txt -r requirements/requirements-dev.txt
# These compile against the installed torch, so they are built without isolation.
for name in "$@"; do
    "${install[@]}" --no-build-isolation -r "requirements/requirements-$name.txt"
done
"${install[@]}" --no-build-isolation --no-deps -e .

"$VENV/bin/python" -c "
import torch, deepspeed, megatron.registry
print(f'torch {torch.__version__}, deepspeed {deepspeed.__version__}, GPUs: {torch.cuda.device_count()}')"
echo "activate it with: source $VENV/bin/activate"
