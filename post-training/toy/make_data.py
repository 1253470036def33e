"""Data of a task whose answers can be checked: `repeat c` is answered by `cccc`.

Written are a tokenizer of bytes, and as lines of JSON

    sft.jsonl       messages: two thirds of the answers are right, the rest are of random letters
    pairs.jsonl     chosen (right) and rejected (wrong): chats about the same letter
    forget.jsonl    right answers about d, for unlearning; retain.jsonl: those about the other letters
    prompts.jsonl   prompt and letter, for rewards and generation
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LETTERS = "abcd"
ANSWER = 4  # letters
ENDS = {"eos_token": "<|end|>", "pad_token": "<|pad|>"}
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("demo-post/data"), help="folder (demo-post/data)")
    parser.add_argument("--chats", type=int, default=600, help="lines of each file (600)")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    write_tokenizer(options.output / "tokenizer")
    draw = random.Random(1234)
    letters = [draw.choice(LETTERS) for _ in range(options.chats)]
    files = {
        "sft": [{"messages": chat(c, right(c) if draw.random() < 2 / 3 else wrong(c, draw))} for c in letters],
        "pairs": [{"chosen": chat(c, right(c)), "rejected": chat(c, wrong(c, draw))} for c in letters],
        "forget": [{"messages": chat("d", right("d"))} for _ in letters],
        "retain": [{"messages": chat(c, right(c))} for c in letters if c != "d"],
        "prompts": [{"messages": chat(c), "letter": c} for c in LETTERS],
    }
    for name, records in files.items():
        path = options.output / f"{name}.jsonl"
        path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
        print(f"{path}: {len(records)} lines")


def right(letter: str) -> str:
    return letter * ANSWER


def wrong(letter: str, draw: random.Random) -> str:
    """Letters of which at least one is another."""
    while (answer := "".join(draw.choices(LETTERS, k=ANSWER))) == right(letter):
        pass
    return answer


def chat(letter: str, answer: str | None = None) -> list[dict[str, str]]:
    asked = [{"role": "user", "content": f"repeat {letter}"}]
    return asked if answer is None else [*asked, {"role": "assistant", "content": answer}]


def write_tokenizer(folder: Path) -> None:
    """A Hugging Face folder: bytes, and the marks of a chat."""
    vocab = {byte: number for number, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*ENDS.values(), "<|user|>", "<|assistant|>"])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **ENDS, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
