"""What is not installed is said in one sentence, with the command that installs it; and each house loads only what it needs.

The houses: the library and its command line, the operator's product, the repository's tool.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fl_bn.cli.main import DEPLOYED, app
from fl_bn.models import build
from fl_bn.support import durable, extras
from fl_bn.support.extras import NotInstalled, lacking, need
from tests.refusals import naming
from tests.test_architecture import HOUSES, at_the_top, imports

ROOT = Path(__file__).resolve().parents[2]
RUN = "rounds=1 clients=2 model='mlp' local-steps=1 name='first'"


def said(*arguments: str) -> tuple[int, str]:
    """The exit code of a command, and its output on one line."""
    done = CliRunner().invoke(app, arguments)
    return done.exit_code, " ".join(done.output.split())


def test_what_needs_an_extra_names_it_and_several_are_one_command(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said("layers", "resnet18")[0] == 0  # control
    assert lacking("it", "matplotlib", "ray") == ""  # control
    for name in ("matplotlib", "jinja2", "ray", "torchvision"):
        monkeypatch.setitem(sys.modules, name, None)
    code, text = said("layers", "resnet18")
    assert (code, text.endswith("needs torchvision, which is not installed: pip install 'fl-bn[vision]'")) == (2, True), text
    for kind in (ImportError, ValueError):
        with naming("pip install 'fl-bn[vision]'", kind):
            build("resnet18", classes=3)
    with naming("it needs matplotlib and jinja2 and ray, which are not installed: pip install 'fl-bn[report,simulation]'", NotInstalled):
        need("it", "matplotlib", "jinja2", "ray")


def test_without_matplotlib_a_command_says_so_and_a_run_ends_without_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [name for name in sys.modules if name.startswith(("fl_bn.report", "fl_bn.run.pictures", "fl_bn.sweep.compare"))]:
        monkeypatch.delitem(sys.modules, name)
    for command in (("report", "nowhere"), ("compare", "--run-config", RUN.replace(" name='first'", ""))):
        code, text = said(*command)
        assert (code, text.endswith("needs matplotlib, which is not installed: pip install 'fl-bn[report]'")) == (2, True), text
    assert list(tmp_path.iterdir()) == []
    assert said("run", "--run-config", RUN)[0] == 0
    assert {"model.safetensors", "summary.md"} <= {file.name for file in (tmp_path / "runs/first").iterdir() if file.suffix != ".png"}
    assert not list((tmp_path / "runs/first").glob("*.png"))
    assert "pip install 'fl-bn[report]'" in caplog.text
    monkeypatch.delitem(extras.EXTRAS, "matplotlib")
    assert isinstance(CliRunner().invoke(app, ["report", "nowhere"]).exception, ModuleNotFoundError)  # control: no matter of extras


def test_a_system_without_file_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(durable, "fcntl", None)
    code, text = said("run", "--run-config", RUN)
    assert (code, "this command needs the file locks of Linux or macOS" in text, "Traceback" in text) == (2, True, False), text


def test_a_lock_keeps_a_second_process_out(tmp_path: Path) -> None:
    with (tmp_path / "x").open("w") as first, (tmp_path / "x").open("w") as second:
        durable.hold(first, shared=True)
        durable.hold(second, shared=True)
        with pytest.raises(BlockingIOError):
            durable.hold(second)


def test_the_default_tests_need_no_package_of_the_slow_ones() -> None:
    """Slow tests import the packages of ``loops`` inside functions: there they are missed, and in the default tests they are not."""
    loops = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["loops"]
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert {*loops} <= pinned
    brought = {re.split(r"[^\w-]", one)[0] for one in requires("segmentation-models-pytorch") or []}
    assert {*loops} & brought == {"timm"}
    beyond = {*loops} - brought
    files = [file for folder in ("fl_bn", "tests") for file in (ROOT / folder).rglob("*.py") if "templates" not in file.parts]
    assert {str(file.relative_to(ROOT)) for file in files if at_the_top(file.read_text()) & beyond} == set()
    assert at_the_top("import opacus.validators\ndef f():\n    import monai") & beyond == {"opacus"}  # control


# Houses

APP = "from fl_bn.cli.main import app\napp()"
WITHOUT_EXTRA = "import sys\nsys.modules['packaging'] = None\n"
LOADED = f"""
import json, sys
print(json.dumps(sorted({{name.partition(".")[0] for name in sys.modules}} & {set(HOUSES)!r})))
"""


def python(code: str, *arguments: str, path: Path = ROOT, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a process of its own that imports this project from ``path``."""
    env = os.environ | {"PYTHONPATH": str(path), "COLUMNS": "200"}
    return subprocess.run([sys.executable, "-c", code, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=120)


def loaded(code: str) -> list[str]:
    """Return which of the other houses are loaded after ``code``."""
    done = python(code + LOADED)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def used(*arguments: str) -> str:
    """Return code that runs ``fl-bn`` with ``arguments`` and goes on."""
    return f"from fl_bn.cli.main import app\ntry:\n    app({list(arguments)!r})\nexcept SystemExit as end:\n    assert not end.code\n"


@pytest.mark.slow
def test_no_command_of_a_research_user_loads_another_house() -> None:
    """Import every module of fl_bn that a command of fl_bn/cli imports, inside its functions, too."""
    named = {name for file in (ROOT / "fl_bn/cli").glob("*.py") for name in imports(file.read_text())}
    names = sorted(name for name in named if name.partition(".")[0] == "fl_bn" and name != "fl_bn.convert")
    assert {"fl_bn.run.config", "fl_bn.flower", "fl_bn.sweep.file", "fl_bn.checks.run"} <= set(names)
    lines = [f"import_module({name!r})" for name in names]
    assert loaded("import fl_bn\nfrom importlib import import_module\n" + "\n".join(lines) + "\n" + used("layers", "mlp")) == []


def test_a_command_of_another_house_loads_that_one() -> None:
    """Negative control."""
    assert loaded(used("kit", "--help")) == ["fl_bn_site"]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "arguments",
    [("kit", "create", "--superlink", "x"), ("status", "--help"), ("submit", "kit/server"), ("doctor", "server"), ("resume", "server")],
    ids=lambda arguments: arguments[0],
)
def test_without_the_extra_a_command_of_a_deployment_says_what_to_install(arguments: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    (tmp_path / "server/server.toml").touch()
    done = python(WITHOUT_EXTRA + APP, *arguments, folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("needs packaging, which is not installed: pip install 'fl-bn[deployment]'")
    assert "Traceback" not in done.stderr


def test_the_help_lists_a_deployment_where_its_extra_is_installed() -> None:
    there, absent = python(APP, "--help"), python(WITHOUT_EXTRA + APP, "--help")
    for command in ("doctor", "run", *DEPLOYED):
        assert f"│ {command} " in there.stdout, there.stderr
        assert (f"│ {command} " in absent.stdout) is (command in ("doctor", "run")), absent.stderr


def test_the_experiments_are_a_program_of_the_checkout() -> None:
    done = python("import runpy; runpy.run_module('experiments', run_name='__main__')", "--help")
    assert (done.returncode, "evidence" in done.stdout) == (0, True), done.stderr
