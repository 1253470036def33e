"""Raw LLaMA or Mistral weights → a checkpoint for any TP; what every import does is in importing.py."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron.checkpoint.reader import CheckpointReader
from megatron.convert.importing import Imported, Incoming, check_output, import_from
from megatron.convert.outputs import Difference, checkpoint_outputs, compare_outputs, random_tokens
from megatron.convert.parts.family import Rule
from megatron.convert.raw.files import HEAD, PARAMS, RawFolder, table
from megatron.convert.raw.formulas import raw_outputs
from megatron.convert.raw.params import keys_of
from megatron.errors import UserError
from megatron.log import get_logger
from megatron.neox_arguments.schema_model import ModelConfig

logger = get_logger(__name__)


def import_raw(
    folder: str | Path,
    output: str | Path,
    *,
    model_size: str = "",
    longest: int | None = None,
    tp: int = 1,
    pp: int = 0,
    iteration: int = 0,
    precision: str = "auto",
    check: bool = True,
    overwrite: bool = False,
) -> Imported:
    """Convert a folder of the authors' own files to a checkpoint.

    Args:
        folder: holds params.json and consolidated.XX.pth, or holds a folder `model_size` that does.
        model_size: name of the release; needed by Llama 3.1 and later, whose files do not differ.
        longest: `max_position_embeddings`; None takes what the release was published with, and logs it.

    The other arguments are `import_from`'s. Raises `UserError`; then nothing is left behind.
    """
    output = Path(output).absolute()
    check_output(output, iteration, overwrite, key="--output_dir")
    raw = RawFolder(_folder(Path(folder), model_size))
    keys = keys_of(raw, model_size, longest)
    if longest is None:
        logger.info(
            f"max_position_embeddings: {keys['max_position_embeddings']}, as this kind of model was published; "
            f"{PARAMS} does not have it. Give --max_position_embeddings for another one"
        )

    def rules(model: ModelConfig) -> dict[str, Rule]:
        found = {rule.ours: rule for rule in table(model)}
        wanted = {name for rule in found.values() for name in rule.theirs}
        left_over = set(raw.tensors) - wanted - (set() if model.no_weight_tying else {HEAD})
        if wrong := sorted((wanted - set(raw.tensors)) | left_over):
            raise UserError(f"{raw.path} does not hold the tensors of its {PARAMS}; see {', '.join(wrong[:8])}")
        return found

    def same(reader: CheckpointReader, model: ModelConfig, dtype: torch.dtype) -> Difference:
        tokens = random_tokens(keys["vocab_size"], model.max_position_embeddings, model.layer_windows or ())
        return compare_outputs(checkpoint_outputs(reader, model, tokens, dtype), raw_outputs(raw, keys, tokens, dtype))

    incoming = Incoming(raw, str(folder), "convert_raw_llama_weights_to_neox.py", keys, rules, same, raw.model_tokens())
    return import_from(
        incoming, output, tp=tp, pp=pp, iteration=iteration, precision=precision, check=check, key="--output_dir"
    )


def _folder(folder: Path, model_size: str) -> Path:
    """The folder with params.json: `folder` itself, or the one of that size in it, as the authors' downloads are."""
    for place in (folder / model_size, folder):
        if (place / PARAMS).is_file():
            return place
    there = sorted(path.parent.name for path in folder.glob(f"*/{PARAMS}"))
    hint = f"; there are {', '.join(there)}: name one as --model_size" if there else ""
    if not folder.is_dir():
        raise UserError(f"--input_dir: folder {folder} does not exist")
    tried = f"neither {folder} nor {folder / model_size} has a" if model_size else f"{folder} has no"
    raise UserError(f"--input_dir: {tried} {PARAMS}{hint}")
