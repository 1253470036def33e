#!/usr/bin/env bash
# What a user types, on one GPU: data, training in bf16 on packed documents, going on, text.  bash tests/gpu/end_to_end.sh
# Needs the environment that tests/gpu/run.sh describes. Everything it makes lies in a temporary folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" prepare_data.py stdlib -d "$work" 2>&1 | tail -n 3
run() {
    local started=$SECONDS
    "$python" deepy.py train.py configs/tiny.yml precision=bfloat16 pack_impl=best_fit intra_document_masking=true \
        seq_length=512 max_position_embeddings=512 num_gpus=1 log_interval=50 eval_interval=1000 data_impl=mmap \
        "data_path=$work/stdlib/stdlib_text_document" "vocab_file=$work/stdlib/tokenizer.json" "save=$work/run" "$@" 2>&1 |
        grep -a -E "attention back-end|loss|continu|rror|seconds" | cut -c1-260 | tail -n 7
    echo "train.py $* took $((SECONDS - started)) s"
}
run train_iters=200 checkpoint_factor=200
run train_iters=250 override_lr_scheduler=true checkpoint_factor=250
"$python" deepy.py generate.py configs/tiny.yml configs/text_generation.yml precision=bfloat16 seq_length=512 \
    max_position_embeddings=512 num_gpus=1 "vocab_file=$work/stdlib/tokenizer.json" "load=$work/run" \
    "data_path=$work/stdlib/stdlib_text_document" maximum_tokens=20 "sample_output_file=$work/samples.txt" 2>&1 | tail -n 4 | cut -c1-300
