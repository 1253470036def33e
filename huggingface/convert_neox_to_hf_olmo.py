"""Convert a checkpoint of an OLMo model to a Hugging Face folder; another name that GPT-NeoX's fork has for it.

python huggingface/convert_neox_to_hf_olmo.py --neox-checkpoint checkpoints/global_step100 \\
    --reference-model allenai/OLMo-2-1124-7B --output-dir hf/ --dtype bfloat16

More: convert_neox_olmo_to_hf.py.
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
    run_olmo_export(__doc__, push, checkpoint="--neox-checkpoint", reference="--reference-model", precision="--dtype")
    return 0


if __name__ == "__main__":
    run_cli(main)
