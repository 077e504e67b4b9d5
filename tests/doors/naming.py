"""Check that what is refused is named: the argument, tensor or client. How the sentence goes on is no matter of tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def naming(key: str, error: type[Exception] | tuple[type[Exception], ...] = ValueError) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect an error whose text has ``key`` in it."""
    with pytest.raises(error) as caught:
        yield caught
    assert key in str(caught.value)
