"""Check the shell commands of the pages without running them: the program exists, has the options, and the run config is valid."""

from __future__ import annotations

import importlib.util
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from functools import cache

import click
import typer

from experiments.cli import experiments
from fl_bn.app.config import RunConfig
from fl_bn.app.overrides import parse_overrides
from fl_bn.cli.main import app
from tests.documentation.pages import ROOT

OPERATORS = {"&&", "||", "|", ";", "&"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
KEYS_OF_NEW = tomllib.loads((ROOT / "fl_bn/templates/app/pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"].keys()


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
    assert not pending, f"a quotation does not end: {pending}"


def _bare(words: list[str]) -> list[str]:
    """Return the command without leading variable assignments, ``sudo -u USER`` and redirections."""
    while words and re.fullmatch(r"\w+=\S*", words[0]):
        words = words[1:]
    if words[:2] == ["sudo", "-u"]:
        words = words[3:]
    return words[: words.index(">")] if ">" in words else words


def check(words: list[str]) -> None:
    """Check one command, given as its words; programs that are no part of fl-bn are taken as they are."""
    program, *arguments = words
    CHECKS.get(program.rsplit("/", 1)[-1], lambda arguments: None)(arguments)


def _fl_bn(arguments: list[str], name: str = "fl-bn") -> None:
    command = _program(name)
    context = click.Context(command, info_name=name)
    said = f"{name} {shlex.join(arguments)}"
    while isinstance(command, click.Group):
        assert arguments, f"Missing command of {said}"
        if arguments == ["--help"]:
            return
        found = command.get_command(context, arguments[0])
        assert found is not None, f"there is no command {said}"
        command, arguments = found, arguments[1:]
    try:
        parsed = command.make_context(command.name, list(arguments)).params
    except click.exceptions.ClickException as error:
        raise AssertionError(f"{said}: {error.format_message()}") from error
    except click.exceptions.Exit:
        return
    text = str(parsed.get("run_config") or "")
    if str(parsed.get("own")) == "myapp":  # in the pages: what `fl-bn new myapp` has written
        assert parse_overrides(text).keys() <= KEYS_OF_NEW, f"{said}: an app of fl-bn new has the keys {', '.join(KEYS_OF_NEW)}"
    else:
        _run_config(text)


@cache
def _program(name: str) -> click.Command:
    return typer.main.get_command(app if name == "fl-bn" else experiments)


def _run_config(text: str) -> None:
    if text and text != "...":
        RunConfig.from_mapping(parse_overrides(text))


def _after(option: str, arguments: list[str]) -> str:
    """Return the word after ``option``; empty: there is none."""
    return arguments[arguments.index(option) + 1] if option in arguments else ""


def _flwr(arguments: list[str]) -> None:
    assert arguments[0] in ("run", "ls", "stop", "log", "config"), f"flwr {arguments[0]}"
    _run_config(_after("--run-config", arguments))


def _python(arguments: list[str]) -> None:
    if arguments[0] == "-c" or arguments[:2] == ["-m", "venv"]:
        return
    if arguments[:2] == ["-m", "experiments"]:
        _fl_bn(arguments[2:], "python -m experiments")
        return
    spec = importlib.util.find_spec(arguments[1]) if arguments[0] == "-m" else None
    assert spec is not None or arguments[0] != "-m", f"there is no module {arguments[1]}"
    assert arguments[0] == "-m" or (ROOT / arguments[0]).exists() or "/" not in arguments[0], f"there is no {arguments[0]}"


def _pip(arguments: list[str]) -> None:
    assert arguments[0] in ("install", "wheel"), arguments
    extras = {extra for word in arguments for found in re.findall(r"\[(.*?)\]", word) for extra in found.split(",")}
    assert extras <= set(PROJECT["project"]["optional-dependencies"]), f"pyproject.toml has no extra {extras}"
    assert (ROOT / _after("-c", arguments)).exists()


CHECKS: dict[str, Callable[[list[str]], None]] = {"fl-bn": _fl_bn, "flwr": _flwr, "python": _python, "python3": _python, "pip": _pip}
