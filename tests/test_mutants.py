"""The mutants of ``tools/mutants.py`` change what they say, in arithmetic alone, and are found again after a move."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools import mutants

pytest.importorskip("cosmic_ray")

CODE = '''
def scaled(x, by=1):
    """Scale by 2 - 1."""
    total: int | None = x * by
    if x < 0 and by:
        raise ValueError(f"{1 + 1} is {2 * 3}" + "4")
    total = x * by
    return total
'''
MOVED = f"import os\n\nclass Group:\n    def other(self):\n        return 1 * 2\n{CODE.replace(chr(10), chr(10) + '    ')}"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "fl_bn/new").mkdir(parents=True)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "text_of", lambda path: (tmp_path / path).read_text())
    monkeypatch.setattr(mutants, "targets", lambda: ["fl_bn/old.py"])
    (tmp_path / "fl_bn/old.py").write_text(CODE)
    return tmp_path


def test_a_mutant_changes_the_one_statement_that_it_says(package: Path) -> None:
    drawn = mutants.drawn(100, seed=0)
    assert len(drawn) == len(set(drawn)) == 6
    assert {one.statement for one in drawn} == {"total: int | None = x * by", "if x < 0 and by:", "total = x * by"}
    for one in drawn:
        _, place = mutants.find(one) or pytest.fail(f"not found: {one}")
        before, after = (ast.unparse(ast.parse(text)).splitlines() for text in (CODE, mutants.changed(CODE, place)[0]))
        assert [(old.strip(), new.strip()) for old, new in zip(before, after, strict=True) if old != new] == [(one.statement, one.becomes)]


def test_a_mutant_is_found_again_after_a_move(package: Path) -> None:
    drawn = mutants.drawn(100, seed=0)
    (package / "fl_bn/old.py").unlink()
    assert [mutants.find(one) for one in drawn] == [None] * 6
    (package / "fl_bn/new/place.py").write_text(MOVED)
    for one in drawn:
        path, place = mutants.find(one) or pytest.fail(f"not found: {one}")
        assert (path, mutants.changed(MOVED, place)[1]) == ("fl_bn/new/place.py", one.becomes)
