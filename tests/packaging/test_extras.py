"""What is not installed is said in one sentence, with the command that installs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fl_bn.cli.main import DEPLOYED, app
from fl_bn.models import build
from fl_bn.support.extras import NotInstalled, lacking, need
from tests.refusals import naming

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
    for name in [name for name in sys.modules if name.startswith(("fl_bn.app.report", "fl_bn.app.pictures", "fl_bn.app.sweep.compare"))]:
        monkeypatch.delitem(sys.modules, name)
    for command in (("report", "nowhere"), ("compare", "--run-config", RUN.replace(" name='first'", ""))):
        code, text = said(*command)
        assert (code, text.endswith("needs matplotlib, which is not installed: pip install 'fl-bn[report]'")) == (2, True), text
    assert list(tmp_path.iterdir()) == []
    assert said("run", "--run-config", RUN)[0] == 0
    assert {"model.safetensors", "summary.md"} <= {file.name for file in (tmp_path / "runs/first").iterdir() if file.suffix != ".png"}
    assert not list((tmp_path / "runs/first").glob("*.png"))
    assert "pip install 'fl-bn[report]'" in caplog.text


# A deployment

APP = "from fl_bn.cli.main import app\napp()"
WITHOUT_EXTRA = "import sys\nsys.modules['packaging'] = None\n"


def python(code: str, *arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a process of its own."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    return subprocess.run([sys.executable, "-c", code, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=120)


def test_without_the_extra_a_command_of_a_deployment_says_what_to_install_and_the_help_does_not_list_it(tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    (tmp_path / "server/server.toml").touch()
    for arguments in (("kit", "create", "--superlink", "x"), ("doctor", "server")):
        done = python(WITHOUT_EXTRA + APP, *arguments, folder=tmp_path)
        assert (done.returncode, "Traceback" in done.stderr) == (2, False)
        assert done.stderr.strip().endswith("needs packaging, which is not installed: pip install 'fl-bn[deployment]'")
    there, absent = python(APP, "--help"), python(WITHOUT_EXTRA + APP, "--help")
    for command in ("doctor", "run", *DEPLOYED):
        assert f"│ {command} " in there.stdout, there.stderr
        assert (f"│ {command} " in absent.stdout) is (command in ("doctor", "run")), absent.stderr
