"""Docstrings of public names begin with an imperative verb, so that the API pages and the commands' help read alike.

``ruff check`` sees to their form. Here stand the beginnings that are no verb in the imperative: a question word, an article, a
preposition, a number, or a verb in the third person.
"""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("fl_bn", "fl_bn_site", "experiments", "benchmarks", "server_app", "client_app")
QUESTIONS = {"how", "what", "when", "where", "whether", "which", "who", "whose", "why"}
ARTICLES = {"a", "all", "an", "both", "each", "every", "no", "none", "one", "some", "that", "the", "these", "this", "those", "two"}
PREPOSITIONS = {
    "above", "after", "as", "at", "before", "below", "beside", "by", "for", "from", "if", "in", "inside", "of", "on", "per", "with",
    "without",
}  # fmt: skip
NOUNS = {"mean", "percent", "seconds", "bytes", "metrics", "names", "moments", "rows", "values"}
THIRD_PERSON = {
    "adds", "applies", "asks", "begins", "builds", "calls", "checks", "computes", "counts", "decides", "declares", "does", "draws", "ends",
    "finds", "gives", "goes", "has", "holds", "is", "keeps", "lets", "loads", "looks", "makes", "measures", "names", "opens", "prints",
    "puts", "raises", "reads", "reports", "returns", "runs", "says", "sends", "serves", "sets", "shows", "starts", "stops", "takes",
    "tells", "tries", "turns", "waits", "wants", "works", "writes", "yields",
}  # fmt: skip
OFFENDERS = QUESTIONS | ARTICLES | PREPOSITIONS | NOUNS | THIRD_PERSON


def public(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield name and docstring of public functions, classes and methods; functions within functions are nobody's API."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not child.name.startswith("_"):
            yield f"{prefix}{child.name}", ast.get_docstring(child) or ""
            if isinstance(child, ast.ClassDef):
                yield from public(child, f"{child.name}.")


def first_word(docstring: str) -> str:
    """Return the first word in lower case, without marks; a quoted name counts as a noun."""
    word = docstring.split(maxsplit=1)[0] if docstring.strip() else ""
    return "a" if word.startswith("`") else word.strip(".,:;").lower()


def offenders(paths: Iterable[Path]) -> list[str]:
    """Return file, name and first line of every docstring that begins with another word than a verb in the imperative."""
    lines = []
    for path in paths:
        for name, docstring in public(ast.parse(path.read_text(encoding="utf-8"))):
            if first_word(docstring) in OFFENDERS:
                lines.append(f"{path.relative_to(ROOT)}: {name}: {docstring.splitlines()[0]}")
    return lines


def test_docstrings_begin_with_an_imperative_verb() -> None:
    files = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    assert offenders(files) == []


@pytest.mark.parametrize(
    "docstring",
    ["What came up.", "Whether it fits.", "The mean.", "Of all clients.", "Says why.", "``x`` by name.", "Returns it.", "A line."],
)
def test_other_beginnings_are_seen(docstring: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "one.py").write_text(f'class Kept:\n    """Keep it."""\n\n    def one(self):\n        """{docstring}"""\n')
    assert offenders([tmp_path / "one.py"]) == [f"one.py: Kept.one: {docstring}"]
