"""Imports run one way, Flower stays behind its boundary, and files stay short: read from the source, not from what happens to be loaded."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*ROOT.glob("fl_bn/**/*.py"), *ROOT.glob("server_app/*.py"), *ROOT.glob("client_app/*.py")])

ORDER = [  # a module may import from layers above its own, and from its own package
    {"names"},
    {"moments", "roles", "robust", "durable", "finding", "options", "own_code", "pairs"},
    {"layers", "models", "exchange"},
    {"methods"},
    {"conversion", "objectives"},
    {"data"},
    {"federation"},
    {"secure"},
    {"flower"},
    {"run"},
    {"report"},
    {"sweep"},
    {"site"},
    {"cli", "server_app", "client_app"},
]
RANK = {module: rank for rank, modules in enumerate(ORDER) for module in modules}
PUBLIC = {"fl_bn/__init__.py"}  # names what users import
EXPORTED = {"convert": "conversion"}

FLOWER = {  # the files outside fl_bn/flower that use Flower, and all of it that they may
    "server_app/app.py": {"flwr.app", "flwr.serverapp"},
    "client_app/app.py": {"flwr.app"},
}


def relative(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def imports(source: str) -> Iterator[str]:
    """Every module imported anywhere in ``source``, inside functions too; ``from fl_bn import flower`` is ``fl_bn.flower``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from [f"fl_bn.{alias.name}" for alias in node.names] if node.module == "fl_bn" else [node.module or ""]


def module_of(name: str) -> str | None:
    """``fl_bn.data.npz`` is ``data``; ``server_app.app`` is ``server_app``; None: not this project's."""
    first, _, rest = name.partition(".")
    if first == "fl_bn":
        return EXPORTED.get(rest, rest).partition(".")[0]
    return first if first in ("server_app", "client_app") else None


def module_of_file(file: str) -> str:
    return (module_of(file.removesuffix(".py").replace("/__init__", "").replace("/", ".")) or "").removesuffix(".py")


def against_the_order(file: str, source: str) -> list[str]:
    own = module_of_file(file)
    found = []
    for name in imports(source):
        other = module_of(name)
        if other is None or other == own:
            continue
        if other not in RANK or own not in RANK:
            found.append(f"{file} imports {name}: not in ORDER")
        elif RANK[other] >= RANK[own]:
            found.append(f"{file} imports {name}, which is not above it")
    return found


@pytest.mark.parametrize("file", SOURCES, ids=relative)
def test_imports_run_one_way(file: Path) -> None:
    if relative(file) not in PUBLIC:
        assert module_of_file(relative(file)) in RANK, f"{relative(file)} belongs to no layer: give it one in ORDER"
        assert against_the_order(relative(file), file.read_text()) == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("fl_bn/data/npz.py", "from fl_bn.federation.local import Samples"),
        ("fl_bn/moments.py", "def f():\n    import fl_bn.layers"),
        ("fl_bn/federation/local.py", "from fl_bn import flower"),
        ("fl_bn/flower/client.py", "from fl_bn.run.config import RunConfig"),
        ("fl_bn/run/config.py", "from fl_bn.cli.main import app"),
        ("fl_bn/run/config.py", "import server_app.app"),
        ("fl_bn/flower/client.py", "from fl_bn.unheard_of import x"),
        ("fl_bn/unheard_of.py", "from fl_bn.moments import pool"),
        ("fl_bn/layers.py", "from fl_bn.models import build"),
    ],
)
def test_an_import_against_the_order_is_found(file: str, source: str) -> None:
    """Negative control."""
    assert len(against_the_order(file, source)) == 1


def flower_of(source: str) -> set[str]:
    return {name for name in imports(source) if name.split(".")[0] in ("flwr", "ray")}


@pytest.mark.parametrize("file", SOURCES, ids=relative)
def test_flower_is_imported_behind_its_boundary_only(file: Path) -> None:
    if not relative(file).startswith("fl_bn/flower/"):
        assert flower_of(file.read_text()) == FLOWER.get(relative(file), set())


def test_the_boundary_is_where_flower_is() -> None:
    inside = [flower_of(file.read_text()) for file in SOURCES if relative(file).startswith("fl_bn/flower/")]
    assert sum(bool(found) for found in inside) > 5
    assert flower_of("def f():\n    from ray import init") == {"ray"}


@pytest.mark.parametrize("file", SOURCES, ids=relative)
def test_files_explain_themselves_and_the_apps_are_short(file: Path) -> None:
    """A file is one idea, however long; the composition roots only put things together."""
    text = file.read_text()
    assert len(text.splitlines()) <= 90 or not relative(file).startswith(("server_app", "client_app"))
    assert ast.get_docstring(ast.parse(text))


def test_no_path_of_a_machine_is_in_the_tree() -> None:
    machine = ("/" + "work/", "/" + "tmp/", "/" + "home/", "/" + "root/")
    texts = {relative(file): file.read_text() for file in [*SOURCES, *ROOT.glob("tests/**/*.py")]}
    assert [name for name, text in texts.items() if any(path in text for path in machine)] == []
