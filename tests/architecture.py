"""The rules of the house, read from the syntax trees: who may import whom, and what may be written where.

Each rule is a function from the parsed sources to violations that name file and line. Functions are looked into too.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from megatron.neox_arguments.groups import GROUPS, all_keys

ROOT = Path(__file__).resolve().parents[1]


def read_levels(package: str) -> dict[str, int]:
    """Name -> level in CONTRIBUTING.md's table of `package`, lowest first; `a` < `b` in one row are two levels."""
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split(f" of `{package}`\n")[1].split("\n#")[0]
    cells = re.findall(r"^\| \d+ \| (.+) \|$", table, re.MULTILINE)
    rows = [row for cell in cells for row in cell.split(" < ")]
    return {name: level for level, row in enumerate(rows) for name in re.findall(r"(?:^|· )`(\w+)`", row)}


# Of the packages, and of the rooms and files inside the large ones.
LEVELS = {package: read_levels(package) for package in ("megatron", "megatron.convert", "megatron.data")}
# These are handed a group of the configuration or plain values, never the whole of it.
WITHOUT_NEOX_ARGS = {"mpu", "tokenizer", "layers", "data", "optim", "model", "objectives", "checkpoint"}

DEEPSPEED_ALLOWED = (
    r"megatron/model/pipe\w*\.py",
    r"megatron/training/(setup|engine)\w*\.py",
)
# prepare_data.py: its default folder is $DATA_DIR, as in GPT-NeoX
ENVIRON_ALLOWED = (
    r"megatron/training/setup\w*\.py",
    r"megatron/(cluster|jobs|commands)/.*",
    r"(megatron/api|deepy|prepare_data)\.py",
)
PRINT_ALLOWED = (r"megatron/(errors|log)\.py", r"megatron/.*\b(\w+_)?cli\.py", r"(?!megatron/).*")
TORCH_FREE = ("megatron.neox_arguments", "megatron.mpu.topology", "megatron.model.partition")
OPTIONAL = {"flash_attn", "mamba_ssm", "causal_conv1d", "wandb", "gigatoken", "fastokens"}
ENTRY_POINT_LINES, FILE_LINES = 60, 800


@dataclass(frozen=True)
class Violation:
    place: str  # file:line
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


@dataclass(frozen=True)
class Import:
    """One imported module (or name in it), with where it stands."""

    target: str  # dotted, as far as it can be a module: `from a.b import c` gives a.b.c
    line: int
    at_load: bool  # executed when the module is loaded: outside functions and `if TYPE_CHECKING`
    typing_only: bool  # under `if TYPE_CHECKING`


@dataclass
class Source:
    path: str  # relative to the root, with slashes
    text: str
    tree: ast.Module = field(init=False)
    module: str = field(init=False)  # dotted name; a package's __init__ has the package's name

    def __post_init__(self) -> None:
        self.tree = ast.parse(self.text, self.path)
        self.module = self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def package(self) -> str:
        """`mpu` for megatron/mpu/layers.py, `errors` for megatron/errors.py, "" outside the library."""
        parts = self.module.split(".")
        return parts[1] if parts[0] == "megatron" and len(parts) > 1 else ""

    @cached_property
    def imports(self) -> list[Import]:
        parent = self.module if self.path.endswith("/__init__.py") else self.module.rpartition(".")[0]
        return list(_imports(self.tree, parent))

    def at(self, line: int) -> str:
        return f"{self.path}:{line}"


def _imports(node: ast.AST, parent: str, at_load: bool = True, typing_only: bool = False) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, at_load, typing_only) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = child.module or ""
            if child.level:
                above = parent.split(".")[: len(parent.split(".")) - child.level + 1]
                base = ".".join([*above, base] if base else above)
            yield from (Import(f"{base}.{alias.name}", child.lineno, at_load, typing_only) for alias in child.names)
        else:
            if isinstance(child, ast.Call) and ast.unparse(child.func) in ("importlib.import_module", "__import__"):
                name = child.args[0] if child.args else None
                if isinstance(name, ast.Constant) and isinstance(name.value, str):
                    yield Import(name.value, child.lineno, at_load, typing_only)
            function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            guarded = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from _imports(child, parent, at_load and not function and not guarded, typing_only or guarded)


def read_sources(root: Path, *folders: str) -> list[Source]:
    """The Python files in the root itself and below `folders`."""
    paths = sorted(root.glob("*.py")) + [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    return [Source(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")) for path in paths]


def matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(re.fullmatch(pattern, path) for pattern in patterns)


def library(sources: list[Source]) -> list[Source]:
    return [source for source in sources if source.path.startswith("megatron/")]


def entry_points(sources: list[Source]) -> list[Source]:
    return [source for source in sources if "/" not in source.path]


# ---- imports


def layering(sources: list[Source]) -> Iterator[Violation]:
    """Imports go down the tables: what is next to a package or room, or above it, is out of reach."""
    for package, levels in LEVELS.items():
        for source in library(sources):
            here = _member(source.module, package)
            if here is None:
                continue
            if here not in levels:
                yield Violation(source.at(1), f"{package}.{here} is not in the table of layers")
                continue
            for imported in source.imports:
                other = _member(imported.target, package)
                if other is None or other == here:
                    continue
                if other not in levels:
                    yield Violation(source.at(imported.line), f"{package}.{other} is not in the table of layers")
                elif levels[other] >= levels[here]:
                    where = "next to" if levels[other] == levels[here] else "above"
                    yield Violation(source.at(imported.line), f"{here} imports {other}, which is {where} it")


def _member(module: str, package: str) -> str | None:
    """The package, room or file of `package` that a module is in; None for the package itself and what is outside."""
    return module.removeprefix(f"{package}.").split(".")[0] if module.startswith(f"{package}.") else None


def outside_imports(sources: list[Source]) -> Iterator[Violation]:
    """The library imports nothing that uses it."""
    outside = {source.module.split(".")[0] for source in sources} - {"megatron"}
    for source in library(sources):
        for imported in source.imports:
            if imported.target.split(".")[0] in outside:
                yield Violation(source.at(imported.line), f"the library imports {imported.target}, which uses it")


def cycles(sources: list[Source]) -> Iterator[Violation]:
    """No module imports itself through others, imports inside functions included; one violation per knot.

    A name imported for the type checker only is no link.
    """
    modules = {source.module: source for source in library(sources)}
    edges: dict[str, dict[str, int]] = {name: {} for name in modules}
    for name, source in modules.items():
        for imported in source.imports:
            target = imported.target if imported.target in modules else imported.target.rpartition(".")[0]
            if target in modules and target != name and not imported.typing_only:
                edges[name].setdefault(target, imported.line)
    reach = {name: _reachable(name, edges) for name in modules}
    seen: set[str] = set()
    for name in sorted(modules):
        if name in reach[name] and name not in seen:
            knot = sorted(other for other in reach[name] if name in reach[other])
            seen.update(knot)
            line = next(line for target, line in edges[name].items() if target in knot)
            yield Violation(modules[name].at(line), "import cycle: " + ", ".join(knot))


def _reachable(start: str, edges: dict[str, dict[str, int]]) -> set[str]:
    found: set[str] = set()
    queue = list(edges[start])
    while queue:
        name = queue.pop()
        if name not in found:
            found.add(name)
            queue.extend(edges[name])
    return found


def deepspeed_places(sources: list[Source]) -> Iterator[Violation]:
    for source in library(sources) + entry_points(sources):
        for imported in source.imports:
            if imported.target.split(".")[0] == "deepspeed" and not matches(source.path, DEEPSPEED_ALLOWED):
                yield Violation(source.at(imported.line), "deepspeed is imported here; ask a method of training/engine")


def torch_free(sources: list[Source]) -> Iterator[Violation]:
    """What the launcher and the dry-run load, and all it imports in turn, needs no torch."""
    modules = {source.module: source for source in library(sources)}
    queue = [name for name in modules if any(name == top or name.startswith(f"{top}.") for top in TORCH_FREE)]
    seen = set(queue)
    while queue:
        name = queue.pop()
        for imported in modules[name].imports:
            if imported.target.split(".")[0] in ("torch", "deepspeed", "transformers"):
                yield Violation(modules[name].at(imported.line), f"{imported.target} where torch may not be needed")
            target = imported.target if imported.target in modules else imported.target.rpartition(".")[0]
            if target in modules and target not in seen:
                seen.add(target)
                queue.append(target)


def optional_packages(sources: list[Source]) -> Iterator[Violation]:
    for source in sources:
        for imported in source.imports:
            if imported.at_load and imported.target.split(".")[0] in OPTIONAL:
                message = f"{imported.target} is optional: import it inside the registry entry that needs it"
                yield Violation(source.at(imported.line), message)


def whole_config(sources: list[Source]) -> Iterator[Violation]:
    for source in library(sources):
        for imported in source.imports:
            if source.package in WITHOUT_NEOX_ARGS and imported.target.endswith(".NeoXArgs"):
                yield Violation(source.at(imported.line), f"{source.package} takes a config group, not NeoXArgs")


def flat_reading(sources: list[Source]) -> Iterator[Violation]:
    """`args.hidden_size` is for tools outside; the library reads `args.model.hidden_size`, which mypy knows."""
    flat = set(all_keys()) - set(GROUPS)
    for source in library(sources):
        if not any(imported.target.endswith(".NeoXArgs") for imported in source.imports):
            continue
        for node in ast.walk(source.tree):
            if (
                isinstance(node, ast.Attribute)
                and node.attr in flat
                and ast.unparse(node.value) in ("args", "process.args")
            ):
                yield Violation(source.at(node.lineno), f"{ast.unparse(node)} without its group")


# ---- constructs


def environment(sources: list[Source]) -> Iterator[Violation]:
    names = {"environ", "environb", "getenv"}
    for source in library(sources) + entry_points(sources):
        if matches(source.path, ENVIRON_ALLOWED):
            continue
        for node in ast.walk(source.tree):
            attribute = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "os" and node.attr in names
            named = (
                isinstance(node, ast.ImportFrom) and node.module == "os" and any(a.name in names for a in node.names)
            )
            if attribute or named:
                message = "the environment is read in training/setup, deepy.py, cluster/ and jobs/ only; pass the value"
                yield Violation(source.at(node.lineno), message)


def global_statements(sources: list[Source]) -> Iterator[Violation]:
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Global):
                yield Violation(source.at(node.lineno), f"global {', '.join(node.names)}: pass it as an argument")


def bare_excepts(sources: list[Source]) -> Iterator[Violation]:
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                yield Violation(source.at(node.lineno), "bare except: name what you expect")


def prints(sources: list[Source]) -> Iterator[Violation]:
    for source in sources:
        if matches(source.path, PRINT_ALLOWED):
            continue
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                yield Violation(
                    source.at(node.lineno), "print in the library: use megatron.log; results go to a cli.py"
                )


def unfinished(sources: list[Source]) -> Iterator[Violation]:
    """Comments that promise later work, and stubs."""
    for source in sources:
        for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
            if token.type == tokenize.COMMENT and re.search(r"\b(TODO|FIXME|XXX|HACK)\b", token.string):
                yield Violation(source.at(token.start[0]), f"unfinished: {token.string.strip()}")
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Raise) and node.exc and "NotImplementedError" in ast.unparse(node.exc):
                yield Violation(source.at(node.lineno), "NotImplementedError: a UserError says what to use instead")


def used_by_tests_only(sources: list[Source]) -> Iterator[Violation]:
    """A function, class or constant of the library that nothing mentions but its definition."""
    mentions = Counter(word for source in sources for word in re.findall(r"\w+", source.text))
    for source in library(sources):
        for node in source.tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names = [] if node.decorator_list else [node.name]  # a decorator may have registered it
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [target.id for target in targets if isinstance(target, ast.Name)]
            else:
                continue
            for name in names:
                if mentions[name] == 1 and not name.startswith("__"):
                    yield Violation(source.at(node.lineno), f"{name} is used nowhere outside the tests: delete it")


# ---- sizes


def entry_point_sizes(sources: list[Source]) -> Iterator[Violation]:
    for source in entry_points(sources):
        lines = source.text.count("\n")
        if lines >= ENTRY_POINT_LINES:
            message = f"{lines} lines; an entry point stays under {ENTRY_POINT_LINES}, its logic goes into megatron/"
            yield Violation(source.at(lines), message)


def file_sizes(sources: list[Source]) -> Iterator[Violation]:
    for source in sources:
        lines = source.text.count("\n")
        if lines >= FILE_LINES:
            yield Violation(source.at(lines), f"{lines} lines; a file stays under {FILE_LINES}: split it by ideas")


RULES: tuple[Callable[[list[Source]], Iterator[Violation]], ...] = (
    layering,
    outside_imports,
    cycles,
    deepspeed_places,
    torch_free,
    optional_packages,
    whole_config,
    flat_reading,
    environment,
    global_statements,
    bare_excepts,
    prints,
    unfinished,
    used_by_tests_only,
    entry_point_sizes,
    file_sizes,
)
