"""`make demo-post`: a model learns to answer, to prefer, to earn rewards, and to forget, in a few minutes on a CPU.

The task is a toy (post-training/toy/make_data.py), the commands are those of any model. Stages and results are kept as
by `make demo`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.home import HOME
from tools.demo import Demo, Stage, last_step, log_of, read_metric

DEMO = Path("demo-post")
DATA = DEMO / "data"
RECIPES = Path("post-training/toy")
TOKENIZE = "python tools/datasets/preprocess_data_with_chat_template.py --tokenizer-path demo-post/data/tokenizer"
TRAINED = {
    "sft": ("SFT", "A model from nothing learns to answer from chats, a third of which are wrong."),
    "rm": ("Reward model", "The same model with a head of one row: which of two answers is better?"),
    "dpo": ("DPO", "Preference without a reward model: right answers become likelier than wrong ones."),
    "grpo": ("GRPO", "The ranks write answers themselves, a function checks them, the better ones are learnt from."),
    "unlearn": ("Unlearn", "Every third step raises the loss on chats about one letter; the others keep the rest."),
}


def stages() -> list[Stage]:
    chats = [
        f"{TOKENIZE} --input {DATA}/{name}.jsonl --jsonl-keys messages --output-prefix {DATA}/{name}"
        for name in ("sft", "retain", "forget")
    ]
    pairs = f"{TOKENIZE} --input {DATA}/pairs.jsonl --chosen-key chosen --rejected-key rejected"
    commands = [*chats, f"{pairs} --output-prefix {DATA}/dpo", f"{pairs} --for-rm --output-prefix {DATA}/rm"]
    return [
        Stage(
            "Data",
            "Chats, pairs and prompts of a task whose answers can be checked, and a tokenizer.",
            f"python {RECIPES}/make_data.py --output {DATA}",
            (DATA / "prompts.jsonl").exists,
        ),
        Stage(
            "Tokenize",
            "Each chat with labels: only the assistant's words are trained. A pair becomes two aligned datasets.",
            "\n".join(commands),
            log_of(DEMO, "Tokenize").exists,
        ),
        *(
            Stage(
                title,
                explanation,
                f"python deepy.py train.py {RECIPES}/{name}.yml",
                lambda folder=DEMO / name: last_step(folder) > 0,
            )
            for name, (title, explanation) in TRAINED.items()
        ),
        Stage(
            "Generate",
            "What the last model answers: letters it knows, and the one it has forgotten.",
            f"python deepy.py generate.py {RECIPES}/unlearn.yml load={DEMO}/unlearn "
            f"text_gen_type=input-file temperature=0 maximum_tokens=8 "
            f"-i {DATA}/prompts.jsonl -o {DEMO}/generated.jsonl",
            (DEMO / "generated.jsonl").exists,
        ),
    ]


def summary() -> bool:
    """Print the first and last figures of every run; whether all of them moved as they should."""
    checks = {
        "SFT: loss falls": ("sft", "train/lm_loss", lambda first, last: last < first),
        "reward model: accuracy rises": ("rm", "train/accuracy", lambda first, last: last > max(first, 0.9)),
        "DPO: margin rises": ("dpo", "train/margins", lambda first, last: last > first),
        "GRPO: reward rises": ("grpo", "rollout/reward", lambda first, last: last > first),
        "unlearning: forget loss rises": ("unlearn", "train/ga_actual_loss", lambda first, last: last > first + 1),
        "unlearning: retain loss holds": ("unlearn", "train/lm_loss", lambda first, last: last < 0.2),
    }
    good = True
    for title, (run, name, wanted) in checks.items():
        values = list(read_metric(DEMO / run, name).values())
        first, last = values[0], mean(values[-2:])
        fits = wanted(first, last)
        good &= fits
        print(f"{title:32}{first:8.3f} -> {last:.3f}{'' if fits else '   <- it did not'}")
    for line in (DEMO / "generated.jsonl").read_text().splitlines():
        print(f"text  {line}"[:160])
    return good


def main() -> int:
    os.chdir(HOME)
    made_from = sorted(str(path) for path in RECIPES.iterdir() if path.is_file())
    return Demo(DEMO, made_from, stages(), summary).run()


if __name__ == "__main__":
    sys.exit(main())
