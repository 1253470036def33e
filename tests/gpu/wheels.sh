#!/usr/bin/env bash
# What a GPU machine without a package index lacks, as wheels:  bash tests/gpu/wheels.sh FOLDER
# DeepSpeed has no wheel on the index; without its C++ operators, which Deepy does not use, it is plain Python. Runs on
# any machine with the index, once: a folder that is complete is left alone.
#   GPU_PYTHON=3.12  GPU_ARCH=x86_64   of the GPU machine
#   GPU_PACKAGES="hjson pydantic>=2"   what else it lacks, with all that these need
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
help=$(sed -n '2,6s/^# //p' tests/gpu/wheels.sh)
case ${1:-} in
-h | --help) echo "$help"; exit 0 ;;
-*) set -- ;;
esac
[ $# = 1 ] || { echo "$help" >&2; exit 2; }
folder=$1
pin=$(sed -n 's/^deepspeed==\([^ ;]*\).*/\1/p' requirements/requirements.txt)
version=${GPU_PYTHON:-3.12}
machine=${GPU_ARCH:-x86_64}
read -ra packages <<<"${GPU_PACKAGES:-hjson pydantic>=2}"
content="deepspeed $pin, Python $version, $machine, ${packages[*]}"
[ "$(cat "$folder/content.txt" 2>/dev/null)" != "$content" ] || { echo "wheels: $folder has them ($content)"; exit 0; }
python=.venv/bin/python
[ -x "$python" ] || python=python3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo "wheels: building and downloading ($content)"
if ! { DS_BUILD_OPS=0 "$python" -m pip wheel --disable-pip-version-check --no-deps --wheel-dir "$work" \
        "deepspeed==$pin" && "$python" -m pip download --disable-pip-version-check --only-binary=:all: \
        --python-version "$version" --platform "manylinux2014_$machine" --platform "manylinux_2_28_$machine" --dest "$work" \
        "${packages[@]}"; } >"$work/log" 2>&1; then
    tail -n 20 "$work/log" >&2
    echo "error: no wheels (above: pip's last words). Run this where pip reaches a package index" >&2
    exit 2
fi
rm "$work/log"
echo "$content" >"$work/content.txt"
rm -rf "$folder"
mkdir -p "$(dirname "$folder")"
mv "$work" "$folder"
chmod 755 "$folder"
du -a -h "$folder"
