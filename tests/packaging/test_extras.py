"""What is not installed, or what this system lacks, is said in one sentence, with the brackets of the command that installs it."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fl_bn.cli.main import app
from fl_bn.models import build
from fl_bn.support import durable, extras
from fl_bn.support.extras import NotInstalled, lacking, need
from tests.test_architecture import at_the_top

ROOT = Path(__file__).resolve().parents[2]
RUN = "rounds=1 clients=2 model='mlp' local-steps=1 name='first'"


def said(*arguments: str) -> tuple[int, str]:
    """The exit code of a command, and its output on one line."""
    done = CliRunner().invoke(app, arguments)
    return done.exit_code, " ".join(done.output.split())


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [name for name in sys.modules if name.startswith(("fl_bn.report", "fl_bn.run.pictures", "fl_bn.sweep.compare"))]:
        monkeypatch.delitem(sys.modules, name)


def test_a_model_of_an_extra_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said("layers", "resnet18")[0] == 0  # control
    monkeypatch.setitem(sys.modules, "torchvision", None)
    code, text = said("layers", "resnet18")
    assert (code, text.endswith("needs torchvision, which is not installed: pip install 'fl-bn[vision]'")) == (2, True), text
    for kind in (ImportError, ValueError):
        with pytest.raises(kind, match=r"pip install 'fl-bn\[vision\]'"):
            build("resnet18", classes=3)


def test_several_are_one_command(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lacking("it", "matplotlib", "ray") == ""
    for name in ("matplotlib", "jinja2", "ray"):
        monkeypatch.setitem(sys.modules, name, None)
    assert lacking("it", "matplotlib", "jinja2", "ray") == (
        "it needs matplotlib and jinja2 and ray, which are not installed: pip install 'fl-bn[report,simulation]'"
    )
    with pytest.raises(NotInstalled):
        need("it", "ray")


@pytest.mark.usefixtures("without_matplotlib")
@pytest.mark.parametrize("command", [("report", "nowhere"), ("compare", "--run-config", RUN)])
def test_a_command_that_needs_an_extra_says_so(command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, text = said(*command)
    assert (code, text) == (
        2,
        "ModuleNotFoundError: this command needs matplotlib, which is not installed: pip install 'fl-bn[report]'",
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("without_matplotlib")
def test_another_missing_module_is_no_matter_of_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.delitem(extras.EXTRAS, "matplotlib")
    done = CliRunner().invoke(app, ["report", "nowhere"])
    assert isinstance(done.exception, ModuleNotFoundError)


@pytest.mark.usefixtures("without_matplotlib")
def test_a_run_ends_without_pictures_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    assert said("run", "--run-config", RUN)[0] == 0
    folder = tmp_path / "runs/first"
    assert (folder / "model.safetensors").is_file()
    assert (folder / "summary.md").is_file()
    assert not list(folder.glob("*.png"))
    assert "pip install 'fl-bn[report]'" in caplog.text


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
