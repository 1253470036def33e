"""Convert a checkpoint of an OLMo model to a Hugging Face folder, with the flags of GPT-NeoX's fork.

python huggingface/convert_neox_olmo_to_hf.py --checkpoint-dir checkpoints/global_step100 \\
    --hf-model allenai/OLMo-2-1124-7B --output-dir hf/ --push-to-hub my-org/my-olmo

--hf-model is the published model that the run began from. Its tokenizer is written, and a folder of
GPT-NeoX's is read as its network; its weights are not used. tools/ckpts/convert_neox_to_hf.py converts every family.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.convert.cli import run_olmo_export
from megatron.errors import run_cli
from megatron.hub import push


def main() -> int:
    """Convert with the fork's flags."""
    run_olmo_export(__doc__, push, checkpoint="--checkpoint-dir", reference="--hf-model", precision="--precision")
    return 0


if __name__ == "__main__":
    run_cli(main)
