"""Change one operator of the product's arithmetic at a time, and see whether the default tests notice: a mutation sample.

    pip install -c constraints.txt -e '.[test,mutants]'
    python -m tools.mutants draw --count 500 --seed 0   # which changes: tests/mutants.jsonl
    python -m tools.mutants run build/mutants.jsonl     # do the default tests notice them? Goes on where it stopped; hours
    python -m tools.mutants keep build/mutants.jsonl    # outcomes into tests/mutants.jsonl; prints the survivors

A mutant is known by function, statement, operator and its number among equals, so it is found again after its function has moved.
cosmic-ray makes the change. No file changes: each mutant has a process of its own, whose import of one module gets other code.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import random
import re
import resource
import select
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import typer

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests/mutants.jsonl"
TARGETS = (  # where `draw` looks
    *(f"fl_bn/bn/{name}.py" for name in ("moments", "hybrid", "layers")),
    *(f"fl_bn/{package}/*.py" for package in ("methods", "objectives", "robust")),
    *(f"fl_bn/federation/{name}.py" for name in ("aggregation", "defence", "optimizers", "gradients", "schema", "payload", "auxiliary")),
    *("fl_bn/data/partition.py", "fl_bn/secure/*.py", "fl_bn/flower/secagg/sums.py", "fl_bn/flower/secagg/masks.py"),
)
LIKE = ("Add Sub Mul Div FloorDiv Mod Pow", "BitOr BitAnd BitXor", "RShift LShift", "Eq NotEq Lt LtE Gt GtE", "Is IsNot")
LEFT_OUT = {"VariableReplacer", "VariableInserter", "ExceptionReplacer", "RemoveDecorator"}
SAYS = re.compile(r"(LOGGER|warnings)\.\w+\(|(log|say|warn)\w*\(")  # a statement that only writes a message
MEMORY = 16 << 30  # bytes of address space of an attempt

app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None)


class Mutant(NamedTuple):
    """One change. ``index``: its number among those of its operator in equal statements of the function. ``module``: where it was last."""

    function: str
    statement: str
    operator: str
    index: int
    becomes: str = ""
    module: str = ""


class Place(NamedTuple):
    """Where an operator applies: its mutant, (line, column), the line of the statement, and the place's number for cosmic-ray."""

    mutant: Mutant
    position: tuple[int, int]
    line: int
    occurrence: int


@cache
def operators() -> Mapping[str, Any]:
    """Return cosmic-ray's operators by name, those that replace like by like: where + becomes <<, everything fails."""
    from cosmic_ray.operators.provider import OperatorProvider

    like = {name: names for names in LIKE for name in names.split()}
    pairs = {name: name.split("_")[1:] for name in OperatorProvider() if name.startswith(("ReplaceBinary", "ReplaceComparison"))}
    wanted = [name for name in OperatorProvider() if name not in LEFT_OUT and len({like[one] for one in pairs.get(name, ())}) < 2]
    return {name: OperatorProvider()[name] for name in wanted}


@cache
def text_of(path: str) -> str:
    return (ROOT / path).read_text()


@cache
def targets() -> list[str]:
    return [file.relative_to(ROOT).as_posix() for pattern in TARGETS for file in sorted(ROOT.glob(pattern))]


def statements(tree: ast.AST, name: str = "", inside: bool = False) -> Iterator[tuple[str, ast.stmt]]:
    """Yield (qualified name of the function, statement) for all statements in functions that do more than say something."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from statements(child, f"{name}.{child.name}".lstrip("."), not isinstance(child, ast.ClassDef))
        elif isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            says = isinstance(child, ast.Expr) and (isinstance(child.value, ast.Constant) or SAYS.match(ast.unparse(child)))
            if inside and isinstance(child, ast.stmt) and not says and not isinstance(child, ast.Raise):
                yield name, child
            yield from statements(child, name, inside)


def header(statement: ast.stmt) -> str:
    return ast.unparse(statement).partition("\n")[0]


def span(node: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (line, column) of the beginning and the end of a node; a compound statement ends where its block begins."""
    block = getattr(node, "body", None)
    end = span(block[0])[0] if isinstance(block, list) and block else (node.end_lineno, node.end_col_offset)
    return (node.lineno, node.col_offset), end


def places(source: str, wanted: Iterable[str]) -> Iterator[Place]:
    """Yield every place in ``source`` where one of the operators ``wanted`` applies."""
    from cosmic_ray.ast import ast_nodes, get_ast

    tree, nodes = ast.parse(source), list(ast_nodes(get_ast(source)))
    inside = [(*span(statement), function, statement) for function, statement in statements(tree)]
    skipped = [span(node) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    skipped += [span(node.annotation) for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)]
    for operator in wanted:
        made, equals = operators()[operator](), Counter[tuple[str, str]]()
        for occurrence, position in enumerate(start for node in nodes for start, _ in made.mutation_positions(node)):
            around = [(function, statement) for start, end, function, statement in inside if start <= position < end]
            if around and not any(start <= position < end for start, end in skipped):
                function, statement = around[-1]
                known = function, header(statement)
                yield Place(Mutant(*known, operator, equals[known]), position, statement.lineno, occurrence)
                equals[known] += 1


def changed(source: str, place: Place) -> tuple[str, str] | None:
    """Return the source with the change, and the changed statement. None if the change is none, or no Python."""
    from cosmic_ray.mutating import mutate_code

    text = mutate_code(source, operators()[place.mutant.operator](), place.occurrence)
    with suppress(SyntaxError):
        if ast.dump(tree := ast.parse(text)) != ast.dump(ast.parse(source)):
            return text, next(header(one) for name, one in statements(tree) if (name, one.lineno) == (place.mutant.function, place.line))
    return None


def drawn(count: int, seed: int) -> list[Mutant]:
    """Draw mutants, at most one for each position. A file's share grows with the square root of its number of positions."""
    rng, keyed, mutants = random.Random(seed), [], list[Mutant]()
    for path in targets():
        at = defaultdict[tuple[int, int], list[Place]](list)
        for place in places(text_of(path), operators()):
            at[place.position].append(place)
        keyed += [(rng.random() ** (len(at) ** 0.5), path, rng.choice(at[position])) for position in sorted(at)]
    for _, path, place in sorted(keyed, key=lambda one: -one[0]):
        if len(mutants) < count and (change := changed(text_of(path), place)):
            mutants.append(Mutant(*place.mutant[:4], change[1], path))
    return sorted(mutants, key=lambda one: (targets().index(one.module), one))


def find(mutant: Mutant) -> tuple[str, Place] | None:
    """Find a mutant's file and place, where it was seen last or in the one file of the package that has such a function and statement."""
    name = mutant.function.rpartition(".")[2]
    package = (file.relative_to(ROOT).as_posix() for file in sorted((ROOT / "fl_bn").rglob("*.py")))
    for paths, full in ([mutant.module] if (ROOT / mutant.module).is_file() else [], True), (package, False):
        found = [(path, place) for path in paths if f"def {name}(" in text_of(path) for place in places(text_of(path), [mutant.operator])]
        found = [one for one in found if one[1].mutant[1:4] == mutant[1:4]]
        found = [one for one in found if f".{one[1].mutant.function}".endswith(f".{mutant.function if full else name}")]
        if len(found) == 1:
            return found[0]
    return None


def instead(paths: Iterable[str], code: Callable[[str], CodeType]) -> None:
    """Let imports of these files get other code."""
    names = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in paths}

    class Loader(SourceFileLoader):
        def get_code(self, fullname: str) -> CodeType:
            return code(names[fullname])

    def find_spec(name: str, *_: object) -> object:
        file = str(ROOT / names[name]) if name in names else ""
        return spec_from_file_location(name, file, loader=Loader(name, file)) if file else None

    sys.meta_path.insert(0, SimpleNamespace(find_spec=find_spec))  # type: ignore[arg-type]


# Attempts to notice a mutant


MUTANT = "FL_BN_MUTANT"  # variable of the environment with the mutant as JSON, on which this plug-in lets pytest run
NEAREST = 8  # test files that are tried before all
IMPORTED = ("torch", "flwr.app", "flwr.serverapp", "flwr.clientapp", "scipy.special", "sklearn.datasets", "hypothesis", "matplotlib.pyplot")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    path, place = find(Mutant(**json.loads(os.environ[MUTANT]))) or ("", None)
    assert place is not None
    text, _ = changed(text_of(path), place) or ("", "")
    instead([path], lambda path: compile(text, str(ROOT / path), "exec", dont_inherit=True))


def attempt(mutant: Mutant, files: Sequence[str], seconds: int) -> str:
    """Run the default tests in these files on a mutant, until one fails. Return its name, or "" if all pass.

    ``seconds``: of the processor; other programs do not count. The process is forked from this one, which has imported what takes long.
    """
    for name in IMPORTED:
        importlib.import_module(name)
    output = tempfile.TemporaryFile("w+")  # noqa: SIM115 (the child writes into it, too)
    if not (child := os.fork()):
        os.setsid()
        for standard in (1, 2):
            os.dup2(output.fileno(), standard)
        seconds += int(time.process_time())
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
        os.environ[MUTANT] = json.dumps(mutant._asdict())
        quiet = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of plug-ins, which are imported here
        code = pytest.main(["-x", "-q", "-rfE", "-n", "0", "-p", "tools.mutants", "-p", "no:cacheprovider", *quiet, *files])
        sys.stdout.flush()
        os._exit(code)
    ends = select.poll()
    ends.register(os.pidfd_open(child), select.POLLIN)
    late = not ends.poll(10_000 * seconds)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if late or code == -signal.SIGXCPU:
        return "timeout of the process"
    output.seek(0)
    named = re.search(r"(?m)^(?:FAILED|ERROR) (\S+)", output.read())
    return "" if not code else named[1] if named else f"end of the process with {code}"


def nearest(path: str, function: str) -> list[str]:
    """Return the test files that name the function and its module most often, with the nearest first."""
    module = Path(path)
    words = function.rpartition(".")[2], path.removesuffix(".py").replace("/", "."), f"test_{module.stem}", f"/{module.parent.name}/"
    files = [file.relative_to(ROOT).as_posix() for file in sorted((ROOT / "tests").rglob("test_*.py"))]
    near = {file: sum(word in file + text_of(file) for word in words) for file in files}
    return sorted((file for file in files if near[file]), key=lambda file: -near[file])[:NEAREST]


def outcome(mutant: Mutant) -> dict[str, Any]:
    """Return what becomes of a mutant, and by which test: of the nearest files, or else of all."""
    if not (found := find(mutant)) or not changed(text_of(found[0]), found[1]):
        return {"outcome": "not found"}
    by = attempt(mutant, nearest(found[0], mutant.function), 300) or attempt(mutant, ["tests"], 1200)
    return {"outcome": "survived" if not by else "timeout" if by.startswith("timeout") else "killed", "by": by}


def read(file: Path) -> dict[Mutant, dict[str, Any]]:
    """Return mutant -> its line in a file. The last line of a mutant counts."""
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return {Mutant(**{field: line[field] for field in Mutant._fields}): line for line in lines}


def write(lines: Iterable[Mapping[str, Any]]) -> None:
    FILE.write_text("".join(json.dumps(line) + "\n" for line in lines))


@app.command()
def draw(count: int = 500, seed: int = 0) -> None:
    """Draw mutants, and write them to tests/mutants.jsonl."""
    write(mutant._asdict() for mutant in drawn(count, seed))


@app.command()
def run(out: Path) -> None:
    """Append a line to OUT for each mutant that it does not have."""
    done = read(out)
    for mutant in [mutant for mutant in read(FILE) if mutant not in done]:
        with out.open("a") as file:
            file.write(json.dumps(mutant._asdict() | outcome(mutant)) + "\n")


@app.command()
def keep(results: Path) -> None:
    """Copy outcomes into tests/mutants.jsonl, and print how many there are of each kind, and the survivors."""
    outcomes = read(results)
    lines = [line | outcomes.get(mutant, {}) for mutant, line in read(FILE).items()]
    write(lines)
    print(dict(Counter(line.get("outcome") for line in lines)))
    for number, line in enumerate(lines, 1):
        if line.get("outcome") == "survived" and "equivalent" not in line:  # written there by hand: why it changes nothing
            print(f"{number}: {line['module']} {line['function']}\n    {line['statement']}\n    {line['becomes']}")


if __name__ == "__main__":
    app()
