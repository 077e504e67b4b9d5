"""Check the shell commands of the pages without running them: the program exists, has the options, and the run config is valid."""

from __future__ import annotations

import importlib.util
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import click
import typer

from fl_bn.cli.main import app
from fl_bn.run.config import RunConfig
from fl_bn.run.overrides import parse_overrides
from tests.documentation.pages import ROOT

SYSTEM = {
    *("apt-get", "cd", "chown", "cp", "docker", "docker-compose", "git", "journalctl", "mypy", "ray", "ruff", "systemctl", "tensorboard"),
    *("flower-simulation", "flower-superlink", "flower-supernode", "mlflow", "openssl", "sh", "useradd", "wandb"),
}
"""Programs that are not part of fl-bn. Their options are not checked."""
OPERATORS = {"&&", "||", "|", ";", "&"}


class Incomplete(AssertionError):
    """Report that a command lacks an argument which it requires."""


def commands(text: str) -> Iterator[list[str]]:
    """Split a shell text into commands; yield the words of each. A command may span lines inside a quotation or after a backslash."""
    pending = ""
    for line in text.replace("\\\n", " ").splitlines():
        pending = f"{pending}\n{line}" if pending else line
        try:
            lexer = shlex.shlex(pending, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            words = list(lexer)
        except ValueError:  # a quotation is open
            continue
        pending = ""
        command: list[str] = []
        for word in [*words, ";"]:
            if word not in OPERATORS:
                command.append(word)
            elif command:
                yield _bare(command)
                command = []
    if pending:
        raise AssertionError(f"a quotation does not end: {pending}")


def _bare(words: list[str]) -> list[str]:
    """Return the command without leading variable assignments, ``sudo -u USER`` and redirections."""
    while words and re.fullmatch(r"\w+=\S*", words[0]):
        words = words[1:]
    if words[:2] == ["sudo", "-u"]:
        words = words[3:]
    return words[: words.index(">")] if ">" in words else words


def check(words: list[str]) -> None:
    """Check one command, given as its words.

    Raises:
        AssertionError: The command could not be run as it is written.
    """
    program, *arguments = words
    program = program.rsplit("/", 1)[-1]
    if program in CHECKS:
        CHECKS[program](arguments)
    elif program not in SYSTEM and program not in (".", "start.sh", "run.sh", "run"):
        raise AssertionError(f"{program!r} is no program that the pages may use: {shlex.join(words)}")


def _fl_bn(arguments: list[str]) -> None:
    command: click.Command = _program()
    context = click.Context(command, info_name="fl-bn")
    while isinstance(command, click.Group):
        if not arguments:
            raise Incomplete(f"Missing command of fl-bn {command.name}")
        if arguments == ["--help"]:
            return
        found = command.get_command(context, arguments[0])
        assert found is not None, f"there is no command fl-bn {' '.join(arguments)}"
        command, arguments = found, arguments[1:]
    try:
        parsed = command.make_context(command.name, list(arguments))
    except click.exceptions.MissingParameter as error:
        raise Incomplete(f"fl-bn {command.name} {shlex.join(arguments)}: {error.format_message()}") from error
    except click.exceptions.ClickException as error:
        raise AssertionError(f"fl-bn {command.name} {shlex.join(arguments)}: {error.format_message()}") from error
    except click.exceptions.Exit:
        return
    text = str(parsed.params.get("run_config") or "")
    if str(parsed.params.get("own")) == "myapp":  # in the pages: what `fl-bn new myapp` has written
        keys = tomllib.loads((ROOT / "fl_bn/templates/app/pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
        assert parse_overrides(text).keys() <= keys.keys(), f"fl-bn {command.name}: an app of fl-bn new has the keys {', '.join(keys)}"
        return
    _run_config(text)


@cache
def _program() -> click.Command:
    return typer.main.get_command(app)


def _run_config(text: str) -> None:
    if text and text != "...":
        RunConfig.from_mapping(parse_overrides(text))


def _flwr(arguments: list[str]) -> None:
    assert arguments[0] in ("run", "ls", "stop", "log", "config"), f"flwr {arguments[0]}"
    if "--run-config" in arguments:
        _run_config(arguments[arguments.index("--run-config") + 1])
    federations = {"deployment", *_project()["tool"]["flwr"]["federations"]}
    words = () if arguments[0] == "config" else arguments[1:3]
    named = [word for word in words if re.fullmatch(r"[a-z-]+", word) and not word.startswith("-")]
    assert set(named) <= federations, f"pyproject.toml has no federation {named}"


def _python(arguments: list[str]) -> None:
    if arguments[:1] == ["-m"]:
        module = arguments[1]
        if module == "venv":
            return
        spec = importlib.util.find_spec(module)
        assert spec is not None, f"there is no module {module}"
        assert spec.origin is not None
        source = spec.origin
    elif arguments[:1] == ["-c"]:
        return
    else:
        source = str(ROOT / arguments[0])
    if source.startswith(str(ROOT)) and "site-packages" not in source:  # an environment may lie in the checkout
        text = Path(source).read_text()
        for option in (word.split("=")[0] for word in arguments if word.startswith("--")):  # argparse's, or a parameter of typer's
            there = f'"{option}"' in text or re.search(rf"\b{option[2:].replace('-', '_')}: ", text)
            assert there, f"{source} has no option {option}"


def _pip(arguments: list[str]) -> None:
    assert arguments[0] in ("install", "wheel"), arguments
    extras = set(_project()["project"]["optional-dependencies"])
    for word in arguments:
        if found := re.search(r"\[(.*?)\]", word):
            assert set(found[1].split(",")) <= extras, f"pyproject.toml has no extra {found[1]}"
    if "-c" in arguments:
        assert (ROOT / arguments[arguments.index("-c") + 1]).is_file()


def _pytest(arguments: list[str]) -> None:
    if "-m" in arguments:
        markers = {line.split(":")[0].split("(")[0] for line in _project()["tool"]["pytest"]["ini_options"]["markers"]}
        used = set(re.findall(r"[a-z]+", arguments[arguments.index("-m") + 1])) - {"and", "or", "not"}
        assert used <= markers, used - markers


def _mkdocs(arguments: list[str]) -> None:
    assert arguments[0] in ("build", "serve"), arguments


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "fl-bn": _fl_bn,
    "flwr": _flwr,
    "python": _python,
    "python3": _python,
    "pip": _pip,
    "pytest": _pytest,
    "mkdocs": _mkdocs,
}


@cache
def _project() -> dict[str, dict]:  # type: ignore[type-arg]
    return tomllib.loads((ROOT / "pyproject.toml").read_text())
