"""Three houses: the library and its command line, the operator's product, the repository's tool. Each loads only what it needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fl_bn.cli.main import DEPLOYED
from tests.test_architecture import HOUSES, imports

ROOT = Path(__file__).parents[2]
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
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def used(*arguments: str) -> str:
    """Return code that runs ``fl-bn`` with ``arguments`` and goes on."""
    return f"from fl_bn.cli.main import app\ntry:\n    app({list(arguments)!r})\nexcept SystemExit as end:\n    assert not end.code\n"


def imported_by_commands() -> list[str]:
    """Return every module of fl_bn that a command of fl_bn/cli imports, inside its functions, too."""
    named = {name for file in (ROOT / "fl_bn/cli").glob("*.py") for name in imports(file.read_text())}
    return sorted(name for name in named if name.partition(".")[0] == "fl_bn" and name != "fl_bn.convert")


@pytest.mark.slow
def test_no_command_of_a_research_user_loads_another_house(tmp_path: Path) -> None:
    names = imported_by_commands()
    assert {"fl_bn.run.config", "fl_bn.flower", "fl_bn.sweep.file", "fl_bn.checks.run", "fl_bn.run.pictures"} <= set(names)
    lines = [f"import_module({name!r})" for name in names]
    assert loaded("import fl_bn\nfrom importlib import import_module\n" + "\n".join(lines) + "\n" + used("layers", "mlp")) == []


def test_a_command_of_another_house_loads_that_one() -> None:
    """Negative control."""
    assert loaded(used("kit", "--help")) == ["fl_bn_site"]


def test_the_help_lists_a_deployment_where_its_extra_is_installed() -> None:
    there, absent = python(APP, "--help"), python(WITHOUT_EXTRA + APP, "--help")
    assert (there.returncode, absent.returncode) == (0, 0), there.stderr + absent.stderr
    for command in DEPLOYED:
        assert f"│ {command} " in there.stdout
        assert f"│ {command} " not in absent.stdout
    assert "│ doctor " in absent.stdout
    assert "│ run " in absent.stdout


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


def test_the_experiments_are_a_program_of_the_checkout_too() -> None:
    run = [sys.executable, "-m", "experiments", "--help"]
    done = subprocess.run(run, cwd=ROOT, env=os.environ | {"COLUMNS": "200"}, capture_output=True, text=True, timeout=120)
    assert (done.returncode, "evidence" in done.stdout) == (0, True), done.stderr
