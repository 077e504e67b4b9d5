"""Check the errors with which fl-bn refuses wrong input, by their fields. Only one test of each user interface checks the whole text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fl_bn.data.record import DataError
from fl_bn.support.wire import WireError


@contextmanager
def refused(section: str, tensor: str = "") -> Iterator[pytest.ExceptionInfo[WireError]]:
    """Expect a WireError about this section and tensor, or about this record and field; empty: about the whole section."""
    with pytest.raises(WireError) as caught:
        yield caught
    assert (caught.value.section, caught.value.tensor) == (section, tensor)
    assert caught.value.problem


@contextmanager
def naming(word: str, kind: type[Exception] = ValueError) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect an error of this kind whose text names this: a key, a file, a value or a shape."""
    with pytest.raises(kind) as caught:
        yield caught
    assert word in str(caught.value)


@contextmanager
def wrong_data(source: object, part: str = "") -> Iterator[pytest.ExceptionInfo[DataError]]:
    """Expect a DataError about this file, function or data set, and this array, line or column."""
    with pytest.raises(DataError) as caught:
        yield caught
    assert (caught.value.source, caught.value.part) == (str(source), part)
