"""What docs/start/watch.md shows of a run is what a run prints: on a terminal, in a pipe, interrupted and resumed."""

from __future__ import annotations

import re

import pytest

from tools.documentation.recordings import PAGE, of_page, recorded, replaced

KEPT = of_page(PAGE.read_text())


def shape(text: str) -> list[str]:
    """Without numbers, which differ from machine to machine, and without the bar, which may have gone on before Ctrl-C was heard."""
    return [re.sub(r"[━╸╺]+", "", re.sub(r"\d+", "#", line)) for line in text.splitlines()]


def test_every_recording_has_its_place_in_the_page() -> None:
    page = PAGE.read_text()
    assert list(KEPT) == ["terminal", "pipe", "interrupted", "resumed"]
    assert all(KEPT.values())
    assert replaced(page, KEPT) == page
    assert of_page(replaced(page, {"pipe": "other"})) == {**KEPT, "pipe": "other"}
    with pytest.raises(ValueError, match="must have one block below <!-- recorded: pipe -->"):
        replaced(page.replace("recorded: pipe", "recorded: tube"), KEPT)


@pytest.mark.slow
def test_a_run_prints_what_the_page_shows() -> None:
    made = recorded()
    assert {name: shape(text) for name, text in made.items()} == {name: shape(text) for name, text in KEPT.items()}
    assert shape(KEPT["pipe"]) != shape(KEPT["pipe"].replace("clients", "sites"))  # control
