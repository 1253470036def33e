"""Which files and modules `plugins` means, when they are imported, and the message when that fails."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron import plugins
from megatron.errors import UserError
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import derive
from megatron.registry import ADDITIONS, added
from tests.neox_args.helpers import SMALL
from tests.plugins.helpers import ROOT, write_config, write_norm

pytestmark = pytest.mark.cpu


def refused(*paths: str, overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(UserError) as error:
        NeoXArgs.from_files(paths, overrides)
    return str(error.value)


# ---- which


def test_a_file_is_looked_for_next_to_the_config_then_in_the_working_directory(tmp_path, monkeypatch) -> None:
    write_norm(tmp_path / "configs/near.py", "near")
    write_norm(tmp_path / "work/near.py", "far")
    write_norm(tmp_path / "work/sub/other.py", "other")
    (tmp_path / "work").mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / "work")
    config = write_config(tmp_path / "configs/run.yml", plugins=["near.py", "sub/other.py"])
    args = NeoXArgs.from_files([config])
    assert args.launcher.plugins == (str(tmp_path / "configs/near.py"), str(tmp_path / "work/sub/other.py"))
    assert set(added("norm")) == {"near", "other"}


def test_the_command_line_replaces_the_list_and_looks_in_the_working_directory(tmp_path, monkeypatch) -> None:
    write_norm(tmp_path / "configs/a.py", "of_the_file")
    write_norm(tmp_path / "b.py", "of_the_command_line")
    monkeypatch.chdir(tmp_path)
    config = write_config(tmp_path / "configs/run.yml", plugins=["a.py"])
    assert NeoXArgs.from_files([config], ["plugins=[b.py]"]).launcher.plugins == (str(tmp_path / "b.py"),)
    assert set(added("norm")) == {"of_the_command_line"}
    assert NeoXArgs.from_files([config], ["plugins=null"]).launcher.plugins == ()
    assert "write the whole list" in refused(config, overrides=("plugins.0=b.py",))


def test_several_files_each_bring_their_own_and_one_named_twice_is_loaded_once(tmp_path) -> None:
    first = write_norm(tmp_path / "models/one.py", "one")
    second = write_norm(tmp_path / "two.py", "two")
    model = write_config(tmp_path / "models/model.yml", plugins="one.py")
    base = write_config(tmp_path / "base.yml", plugins=["two.py"])
    child = write_config(tmp_path / "child.yml", extends="base.yml", plugins=["models/one.py"], norm="two")
    args = NeoXArgs.from_files([model, child])
    assert args.launcher.plugins == (str(first), str(second))
    assert args.model.norm == "two"
    assert len(ADDITIONS) == 2
    assert NeoXArgs.from_files([base]).launcher.plugins == (str(second),)


def test_a_module_and_its_file_are_one_plugin(tmp_path, monkeypatch) -> None:
    file = write_norm(tmp_path / "plug_once.py", "once")
    (tmp_path / "link.py").symlink_to(file)
    monkeypatch.syspath_prepend(tmp_path)
    config = write_config(tmp_path / "run.yml", plugins=["plug_once", "plug_once.py", "link.py"])
    NeoXArgs.from_files([config])
    assert [str(addition) for addition in ADDITIONS] == ["norm: once"]


def test_a_module_in_a_package_with_its_registrations_spread_over_files(tmp_path, monkeypatch) -> None:
    write_norm(tmp_path / "plug_package/norms.py", "packed")
    (tmp_path / "plug_package/__init__.py").write_text("from plug_package import norms\n")
    monkeypatch.syspath_prepend(tmp_path)
    args = derive(NeoXArgs.from_files([write_config(tmp_path / "run.yml", plugins=["plug_package"], **SMALL)]))
    [plugin] = plugins.find_loaded(args.launcher.plugins)
    assert [str(addition) for addition in plugin.registered] == ["norm: packed"]
    before = args.launcher.plugin_sources
    (tmp_path / "plug_package/norms.py").write_text("changed = True\n")
    assert plugins._digest(plugin.file, plugin.folder) != before["plug_package"]


# ---- errors


def test_a_missing_file_names_the_line_and_where_it_was_looked_for(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "configs/run.yml"
    path.parent.mkdir()
    write_norm(tmp_path / "configs/there.py", "there")
    path.write_text("norm: there\nplugins:\n  - there.py\n  - gone.py\n")
    message = refused(str(path))
    assert message.startswith(f"{path}:4: plugins: there is no file gone.py")
    assert f"{tmp_path}/configs/gone.py" in message and f"and {tmp_path}/gone.py" in message


def test_a_missing_module_names_the_line_the_path_and_a_file_of_that_name(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(tmp_path / "on_the_path")
    (tmp_path / "on_the_path").mkdir()
    config = write_config(tmp_path / "run.yml", num_layers=2, plugins=["plug_gone"])
    message = refused(config)
    assert message.startswith(f"{config}:3: plugins: there is no module 'plug_gone'; looked for in ")
    assert str(tmp_path / "on_the_path") in message and "PYTHONPATH" in message
    write_norm(tmp_path / "plug_gone.py", "gone")
    assert f"There is {tmp_path}/plug_gone.py: name the file (plug_gone.py)" in refused(config)
    assert "there is no module 'plug_gone.part'" in refused(write_config(tmp_path / "b.yml", plugins="plug_gone.part"))


@pytest.mark.parametrize(
    ("code", "last"),
    [
        ("def f():\n    return 1 / 0\nf()\n", "ZeroDivisionError: division by zero"),
        ("import plug_that_is_not_there\n", "ModuleNotFoundError: No module named 'plug_that_is_not_there'"),
        ("def f(:\n", "SyntaxError: invalid syntax"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3"),
    ],
)
@pytest.mark.parametrize("how", ["file", "module"])
def test_an_error_inside_a_plugin_is_shown_with_its_own_traceback(code, last, how, tmp_path, monkeypatch) -> None:
    (tmp_path / "plug_bad.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    name = "plug_bad" if how == "module" else "plug_bad.py"
    message = refused(write_config(tmp_path / "run.yml", plugins=[name]))
    assert re.search(f"run.yml:2: plugins: .*{name} ", message)
    assert message.splitlines()[-1] == last
    assert f'"{tmp_path}/plug_bad.py", line' in message
    assert "megatron/plugins.py" not in message and "importlib" not in message


def test_what_a_failed_plugin_registered_is_taken_back(tmp_path) -> None:
    path = write_norm(tmp_path / "plug_half.py", "half")
    path.write_text(path.read_text() + "\nraise RuntimeError('late')\n")
    config = write_config(tmp_path / "run.yml", plugins=[path.name])
    for _ in range(2):  # the second attempt fails in the same way, and not over the first one's remains
        assert refused(config).endswith("RuntimeError: late")
        assert added("norm") == {}
    path.write_text(path.read_text().replace("raise RuntimeError('late')", ""))
    NeoXArgs.from_files([config])
    assert set(added("norm")) == {"half"}


def test_a_name_that_is_taken_names_both_places(tmp_path) -> None:
    write_norm(tmp_path / "first.py", "mine")
    write_norm(tmp_path / "second.py", "mine")
    message = refused(write_config(tmp_path / "run.yml", plugins=["first.py", "second.py"]))
    assert "norm: 'mine' is registered twice" in message
    assert f"at {tmp_path}/first.py:4 and at {tmp_path}/second.py:4" in message
    assert set(added("norm")) == {"mine"}
    write_norm(tmp_path / "third.py", "rmsnorm")
    message = refused(write_config(tmp_path / "other.yml", plugins=["third.py"]))
    assert re.search(r"norm: 'rmsnorm' .*layers/norms/rmsnorm\.py:\d+ .*third\.py:\d+", message)


def test_an_entry_of_the_wrong_kind_is_refused(tmp_path) -> None:
    (tmp_path / "wrong.py").write_text("from megatron.layers.norms import NORMS\n\nNORMS.register('x')(lambda x: x)\n")
    message = refused(write_config(tmp_path / "run.yml", plugins=["wrong.py"]))
    assert (
        f"{tmp_path}/wrong.py:3: norm 'x': expected a subclass of megatron.layers.norms.Norm, got a function" in message
    )


def test_a_plugin_that_registers_nothing_is_mentioned(tmp_path) -> None:
    (tmp_path / "idle.py").write_text("x = 1\n")
    config = write_config(tmp_path / "run.yml", plugins=["idle.py"])
    assert NeoXArgs.from_files([config]).notes == (f"{config}:2: plugin {tmp_path}/idle.py registers nothing",)


@pytest.mark.parametrize("value", [3, [1], {"a": "b.py"}, ["a.py", None]])
def test_a_value_of_another_type_is_refused_as_any(value, tmp_path) -> None:
    assert "run.yml:1: plugins: " in refused(write_config(tmp_path / "run.yml", plugins=value))


# ---- by value to other processes, and in checkpoints


def test_a_resolved_config_imports_its_plugins_and_notices_another_source(tmp_path) -> None:
    path = write_norm(tmp_path / "mine.py", "mine")
    args = derive(NeoXArgs.from_files([write_config(tmp_path / "run.yml", plugins=["mine.py"], norm="mine", **SMALL)]))
    text = args.to_resolved()
    assert args.launcher.plugin_sources == {str(path): plugins._digest(str(path), None)}
    code = f"""
import sys
from megatron.neox_arguments import NeoXArgs
from megatron.errors import run_cli
run_cli(lambda: print(NeoXArgs.from_resolved({text!r}).model.norm))
"""

    def elsewhere() -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)

    done = elsewhere()
    assert (done.returncode, done.stdout) == (0, "mine\n")
    path.write_text(path.read_text() + "\n# another version\n")
    done = elsewhere()
    assert done.returncode == 2 and f"plugins: {path} " in done.stderr and "sha256" in done.stderr
    path.unlink()
    done = elsewhere()
    assert done.returncode == 2 and re.search(f"plugins: .*no file {re.escape(str(path))} ", done.stderr)


def test_plugins_say_what_changed_since_a_checkpoint() -> None:
    then = {"/a/one.py": "1" * 64, "/a/two.py": "2" * 64, "package.three": "3" * 64}
    now = {"/b/one.py": "1" * 64, "/a/two.py": "4" * 64, "/a/four.py": "5" * 64}
    new, changed, gone = plugins.source_changes(then, now)
    assert "/a/four.py is new" in new and "package.three was loaded" in gone
    assert re.search("/a/two.py .*sha256 2{12}, now 4{12}", changed)
    assert plugins.source_changes(None, None) == plugins.source_changes(then, then) == []


def test_deriving_twice_changes_nothing(tmp_path) -> None:
    write_norm(tmp_path / "mine.py", "mine")
    args = derive(NeoXArgs.from_files([write_config(tmp_path / "run.yml", plugins=["mine.py"], norm="mine", **SMALL)]))
    again = derive(NeoXArgs.from_resolved(args.to_resolved()))
    assert again.to_dict() == args.to_dict() and again.hash() == args.hash()


def test_loading_stays_light_without_plugins_and_needs_what_they_need_with(tmp_path: Path) -> None:
    (tmp_path / "light.py").write_text(
        "from megatron.optim.schedules import LR_DECAY_STYLES\n\n"
        "LR_DECAY_STYLES.register('half')(lambda p, lr, min_lr: lr / 2)\n"
    )
    plain = write_config(tmp_path / "plain.yml", **SMALL)
    plugged = write_config(tmp_path / "plugged.yml", **SMALL, plugins=["light.py"], lr_decay_style="half")
    code = """
import sys
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import derive
derive(NeoXArgs.from_files([sys.argv[1]]))
print(sorted({"torch", "deepspeed", "transformers"} & set(sys.modules)))
"""
    for config in (plain, plugged):
        command = [sys.executable, "-c", code, config]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
