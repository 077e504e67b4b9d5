"""Imports without the collector of garbage: it comes back, and leaves alone what was loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from fl_bn.support.imports import without_gc


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_what_is_made_within_is_never_looked_at_again() -> None:
    gc.unfreeze()
    with without_gc():
        assert not gc.isenabled()
        made = [[]]  # type: ignore[var-annotated]
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
    assert not any(found is made for found in gc.get_objects())
    gc.unfreeze()
    assert any(found is made for found in gc.get_objects()), "negative control"


def test_a_collector_that_was_off_stays_off_and_a_failing_import_turns_it_on_again() -> None:
    gc.disable()
    with without_gc():
        pass
    assert not gc.isenabled()
    gc.enable()
    with pytest.raises(ModuleNotFoundError), without_gc():
        raise ModuleNotFoundError
    assert gc.isenabled()
