"""Make a test of each method: of the common ones by default, of the others as slow cases or by ``pytest --method NAME``."""

from __future__ import annotations

import pytest

from fl_bn.methods import METHODS
from tests.listed import common_first

every_method = pytest.mark.parametrize("method_name", common_first(METHODS))
