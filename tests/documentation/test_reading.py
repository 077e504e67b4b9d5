"""No sentence of README and site is long. How easy a page is to read: ``python -m tools.documentation.reading``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.documentation.pages import ROOT, SITE, name, prose
from tests.listed import listed
from tools.documentation.reading import WORD, ease, sentences, syllables

LIMIT = 25


def too_long(page: Path) -> list[str]:
    return [sentence for sentence in sentences(prose(page)) if len(WORD.findall(sentence)) > LIMIT]


@listed("page", [ROOT / "README.md", *SITE], ids=name)
def test_no_long_sentence(page: Path) -> None:
    assert too_long(page) == []


def test_a_long_sentence_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"A short one. {' '.join(['And'] + ['so on'] * 13)}.\n")
    assert len(too_long(page)) == 1


@pytest.mark.parametrize(("word", "count"), [("a", 1), ("the", 1), ("batch", 1), ("table", 2), ("statistics", 3), ("normalisation", 5)])
def test_syllables(word: str, count: int) -> None:
    assert syllables(word) == count


def test_ease_tells_plain_from_dense() -> None:
    plain = ease(["The cat sat on the mat. It was warm."])
    dense = ease(["Heterogeneous federated optimisation necessitates statistical calibration."])
    assert plain.flesch > 90 > 0 > dense.flesch
