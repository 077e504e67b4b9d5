"""Imports run one way, Flower stays behind its boundary, and files stay short: read from the source, not from what happens to be loaded."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from fl_bn.support.extras import EXTRAS

ROOT = Path(__file__).parents[1]
PLACES = ("fl_bn/**/*.py", "fl_bn_site/**/*.py", "experiments/**/*.py", "server_app/*.py", "client_app/*.py")
SOURCES = sorted(file for place in PLACES for file in ROOT.glob(place) if "templates" not in file.parts)

ORDER = [  # a module may import from layers above its own, and from its own package
    {"support"},
    {"options", "bn", "robust"},
    {"models", "exchange"},
    {"methods"},
    {"objectives", "task"},
    {"data"},
    {"federation"},
    {"secure"},
    {"flower"},
    {"app"},
    {"app.report"},
    {"app.sweep"},
    {"app.advise", "app.checks"},
    {"cli", "app.server", "app.client"},
    {"server_app", "client_app"},
    {"fl_bn_site", "experiments"},  # of the first fl_bn knows where its command line adds its commands, and nowhere else
]
RANK = {module: rank for rank, modules in enumerate(ORDER) for module in modules}
MOUNTS = {"fl_bn/cli/main.py", "fl_bn/cli/doctor.py"}
HOUSES = ("server_app", "client_app", "fl_bn_site", "experiments")
PUBLIC = {"fl_bn/__init__.py"}  # names what users import
TYPES = {("fl_bn/bn/conversion.py", "fl_bn.methods.method")}  # imported for annotations alone
EXPORTED = {"convert": "bn"}

FLOWER_PUBLIC = {"flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy"}  # for all of fl_bn/flower
FLOWER_LEGACY = {  # public, too, but of Flower's older API: the files that still need it
    "fl_bn/flower/legacy.py": {"flwr.common", "flwr.server", "flwr.server.strategy"},
    "fl_bn/flower/secagg/client.py": {"flwr.common"},
}
RAY = {  # the files that use Ray itself
    "fl_bn/flower/lost_actors.py": {"ray", "ray.exceptions"},
}
FLOWER_PRIVATE = "fl_bn/flower/compat.py"  # the one file that may name anything else of Flower's, or ask for its version

FLOWER = {  # the files outside fl_bn/flower that use Flower, and all of it that they may
    "fl_bn/app/server.py": {"flwr.app", "flwr.serverapp"},
    "fl_bn/app/client.py": {"flwr.app", "flwr.clientapp"},
    "fl_bn_site/leaving.py": {"flwr.app"},
    "fl_bn_site/answer.py": {"flwr.app"},
    "fl_bn_site/wire.py": {"flwr.app"},
}


def relative(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


@cache
def imports(source: str) -> tuple[str, ...]:
    """Every module imported anywhere in ``source``, inside functions too; ``from fl_bn import flower`` is ``fl_bn.flower``."""
    return tuple(_imports(source))


def _imports(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            module = node.module or ""
            yield from [f"{module}.{alias.name}" for alias in node.names] if module in ("fl_bn", "fl_bn.app") else [module]


def module_of(name: str) -> str | None:
    """``fl_bn.data.npz`` is ``data``, ``fl_bn.app.sweep.file`` ``app.sweep``, ``server_app.app`` ``server_app``; None: another project."""
    first, *rest = name.split(".")
    if first == "fl_bn":
        part = ".".join(rest[:2])
        return part if part in RANK else EXPORTED.get(part, rest[0] if rest else "")
    return first if first in HOUSES else None


def module_of_file(file: str) -> str:
    return (module_of(file.removesuffix(".py").replace("/__init__", "").replace("/", ".")) or "").removesuffix(".py")


def against_the_order(file: str, source: str) -> list[str]:
    own = module_of_file(file)
    found = []
    for name in imports(source):
        other = module_of(name)
        if other is None or other == own or (file, name) in TYPES:
            continue
        if other not in RANK or own not in RANK:
            found.append(f"{file} imports {name}: not in ORDER")
        elif RANK[other] >= RANK[own]:
            found.append(f"{file} imports {name}, which is not above it")
    return found


def test_imports_run_one_way() -> None:
    sources = {relative(file): file.read_text() for file in SOURCES if relative(file) not in PUBLIC | MOUNTS}
    assert {file for file in sources if module_of_file(file) not in RANK} == set(), "they belong to no layer: give them one in ORDER"
    assert [found for file, source in sources.items() for found in against_the_order(file, source)] == []


def test_the_command_line_alone_knows_the_other_houses() -> None:
    """They are looked up where a command of theirs is given, so that nothing of a research user's loads them."""
    for file in MOUNTS:
        source = (ROOT / file).read_text()
        assert {name for name in imports(source) if name.partition(".")[0] in HOUSES}
        assert not {name for name in at_the_top(source) if name in HOUSES}


def test_an_import_against_the_order_is_found() -> None:
    """Negative control."""
    for file, source in (
        ("fl_bn/data/npz.py", "from fl_bn.federation.local import Samples"),
        ("fl_bn/bn/moments.py", "def f():\n    import fl_bn.methods"),
        ("fl_bn/federation/local.py", "from fl_bn import flower"),
        ("fl_bn/app/config.py", "from fl_bn.app import report"),
        ("fl_bn/app/sweep/file.py", "from fl_bn.app.server import app"),
        ("fl_bn/unheard_of.py", "from fl_bn.bn.moments import pool"),
    ):
        assert len(against_the_order(file, source)) == 1


def flower_of(source: str) -> set[str]:
    return {name for name in imports(source) if name.split(".")[0] in ("flwr", "ray")}


def test_flower_is_imported_behind_its_boundary_only() -> None:
    found = {relative(file): flower_of(file.read_text()) for file in SOURCES if not relative(file).startswith("fl_bn/flower/")}
    assert {file: names for file, names in found.items() if names != FLOWER.get(file, set()) | RAY.get(file, set())} == {}


def beyond_the_public(file: str, source: str) -> list[str]:
    """What ``file`` of fl_bn/flower uses of Flower that it may not: modules, imported or named in a text, and its version."""
    if file == FLOWER_PRIVATE:
        return []
    allowed = FLOWER_PUBLIC | FLOWER_LEGACY.get(file, set()) | RAY.get(file, set())
    texts = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    named = {text for text in texts if text.startswith("flwr.") and text.replace(".", "").replace("_", "").isalnum()}
    versions = re.findall(r"version\(['\"]flwr['\"]\)|flwr\.__version__", source)
    return sorted((flower_of(source) | named) - allowed) + ["its version"] * len(versions)


def test_what_depends_on_flowers_version_is_in_one_file() -> None:
    found = {relative(file): beyond_the_public(relative(file), file.read_text()) for file in SOURCES if relative(file).startswith("fl_bn")}
    assert {file: names for file, names in found.items() if names} == {}


def test_a_private_part_of_flower_is_found() -> None:
    """Negative control."""
    for source, found in (
        ("from flwr.common.logger import log", ["flwr.common.logger"]),
        ("def f():\n    from flwr.common import recorddict_compat", ["flwr.common"]),
        ("import flwr\nflwr.__version__", ["flwr", "its version"]),
        ("from importlib.metadata import version\nversion('flwr')", ["its version"]),
        ("import_module('flwr.client.mod')", ["flwr.client.mod"]),
        ("from flwr.app import Message\n'flwr.app'", []),
    ):
        assert beyond_the_public("fl_bn/flower/strategy.py", source) == found


def test_files_explain_themselves_and_the_apps_are_short() -> None:
    """A file is one idea, however long; the composition roots only put things together."""
    sources = {relative(file): file.read_text() for file in SOURCES}
    roots = [file for file in sources if file.startswith(("fl_bn/app/server.py", "fl_bn/app/client.py", "server_app", "client_app"))]
    assert len(roots) == 6
    assert [file for file in roots if len(sources[file].splitlines()) > 90] == []
    assert [file for file, text in sources.items() if not ast.get_docstring(ast.parse(text))] == []


WRITES = re.compile(r"""\.write_(text|bytes)\(|open\(["'][wax]""")
NOT_DURABLE = {
    "fl_bn/federation/engines/clients.py": "a temporary folder",
    "fl_bn/flower/deployment.py": "the rounds that status shows: it warns, and goes on",
    "fl_bn/app/console.py": "the log: lines are lost",
    "fl_bn/support/durable.py": "this is it",
}


def test_what_writes_results_is_durable() -> None:
    """A file that a full disk or a crash cuts short must not pass for a whole one. The sites' keys and kits are never overwritten."""
    found = {relative(file) for file in SOURCES if relative(file).startswith("fl_bn/") and WRITES.search(file.read_text())}
    assert found == NOT_DURABLE.keys()


def test_a_round_is_read_in_four_files_and_500_lines() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text().partition("## A round on one page")[2].partition("\n## ")[0]
    named = re.findall(r"^\d\. `(fl_bn/[^`]+)`", page, re.MULTILINE)
    lines = [len((ROOT / file).read_text().splitlines()) for file in named]
    assert "four files are a round of FedAvg, under 500 lines in all" in page
    assert [Path(file).name for file in named[:4]] == ["run.py", "client_round.py", "server.py", "fedavg.py"]
    assert sum(lines[:4]) < 500


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def distributions(wanted: list[str]) -> set[str]:
    return {re.split(r"[\[<>=! ]", line)[0] for line in wanted}


def at_the_top(source: str) -> set[str]:
    """Packages that ``source`` imports when it is imported itself."""
    tops = set[str]()
    for node in ast.parse(source).body:
        tops |= {name.partition(".")[0] for name in imports(ast.unparse(node))} if isinstance(node, ast.Import | ast.ImportFrom) else set()
    return tops


def test_the_core_imports_nothing_of_an_extra() -> None:
    """Packages of an extra are imported inside functions, or in files that serve pictures, pages, Ray or a deployment and nothing else."""
    outside = ("fl_bn/app/report/", "fl_bn/app/pictures.py", "fl_bn_site/", "experiments/", *RAY)
    found = {relative(file): at_the_top(file.read_text()) & EXTRAS.keys() for file in SOURCES if not relative(file).startswith(outside)}
    assert {file: names for file, names in found.items() if names} == {}
    assert at_the_top("import torch\nimport ray.util\ndef f():\n    import jinja2") == {"torch", "ray"}  # control
