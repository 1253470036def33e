"""The commands that README and the guides show: lines of a shell in code blocks, and programs in `backticks`."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    *("README.md", "CONTRIBUTING.md", "configs/README.md", "configs/llama/README.md", "slurm/README.md"),
    "post-training/README.md",
    *sorted(f"documentation/{path.name}" for path in (ROOT / "documentation").glob("*.md")),
]
_PROGRAMS = r"(?:[A-Z_]+=\S+ )?(?:python|torchrun|srun|sbatch|make|\./[\w/]+\.\w+|bash) "
_STARTS = re.compile(rf"^(?:{_PROGRAMS}|deepy |cat >|printf |source |for \w+ in )", re.MULTILINE)

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands(document: str, languages: Collection[str] = ("", "bash", "sh")) -> list[str]:
    """Every command of a document in its order, each once; one of several lines (`\\`, `|`, <<'END', for) is one."""
    text = (ROOT / document).read_text(encoding="utf-8")
    found: list[tuple[int, str]] = []
    for block in _BLOCK.finditer(text):
        if block[1] in languages and _STARTS.search(block[2]):
            found += [(block.start(), one) for one in _statements(block[2])]
    outside = _BLOCK.sub(lambda block: " " * len(block[0]), text)
    for span in re.finditer(rf"`({_PROGRAMS}[^`]+)`", outside):
        found.append((span.start(), " ".join(span[1].split())))
    return list(dict.fromkeys(command for _, command in sorted(found, key=lambda one: one[0])))


def _statements(block: str) -> list[str]:
    statements: list[str] = []
    ends = ""  # what closes the statement that is open: a line, or "" for one that does not end in \ or |
    for line in block.splitlines():
        opened = bool(statements) and bool(ends)
        if opened:
            statements[-1] += f"\n{line}"
            if ends == "continued":
                ends = ends if line.endswith(("\\", "|")) else ""
            elif line == ends:
                ends = ""
            continue
        if not line.strip() or line.startswith("#"):
            continue
        statements.append(re.sub(r"  +# .*$", "", line).rstrip())
        document = re.search(r"<<'(\w+)'$", line)
        ends = document[1] if document else "done" if line.startswith("for ") else ""
        ends = ends or ("continued" if line.endswith(("\\", "|")) else "")
    return statements
