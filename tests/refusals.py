"""What a boundary refuses, asserted by the fields of the error; its wording is for the one test of each door that reads it whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fl_bn.support.wire import WireError


@contextmanager
def refused(section: str, tensor: str = "") -> Iterator[pytest.ExceptionInfo[WireError]]:
    """Expect a WireError about this section and tensor, or about this record and field.

    Args:
        section: The section of tensors, or the record.
        tensor: The tensor's or the field's name; empty where the error is about the whole section.
    """
    with pytest.raises(WireError) as caught:
        yield caught
    assert (caught.value.section, caught.value.tensor) == (section, tensor)
    assert caught.value.problem
