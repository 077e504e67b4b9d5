"""Define the regression task: one or several numbers per sample.

Legend: B samples of a batch, D values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fl_bn.task.targets import VALUES, alike
from fl_bn.task.task import Range, Task


class Regression(Task):
    """Define a task with D values per sample: (B, D), or (B,) for one value.

    The loss is the mean squared error. The metrics are ``mse``, ``mae`` and ``r2``, a
    mean over the values that vary. Its rounding error is about ``1e-16 (mean / sd)^2``.

    >>> from fl_bn import Regression
    >>> state = Regression().state()
    >>> state.update(torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 3.0]))
    >>> state["r2"], state["mae"]
    (0.5, 0.5)

    Attributes:
        target_key: see ``Task``.
        input_keys: see ``Task``.
        output_key: see ``Task``.
    """

    name, metric = "regression", "r2"
    ranges: ClassVar[Mapping[str, Range]] = {"r2": (-math.inf, 1.0), "mse": (0.0, math.inf), "mae": (0.0, math.inf)}
    takes = (VALUES,)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean squared error of outputs and targets, (B, D) or (B,)."""
        output, targets = alike(self.name, output, targets)
        dtype = torch.promote_types(output.dtype, targets.dtype)  # values are not rounded to the bfloat16 of mixed precision
        return F.mse_loss(output.to(dtype), targets.to(dtype))

    def sums(self, output: Tensor, targets: Tensor) -> dict[str, Tensor | float]:
        """Sum squared and absolute errors, targets and squared targets: each (D,), float64."""
        output, y = (t.double().reshape(len(t), -1) for t in alike(self.name, output, targets))
        error = output - y
        sums = {"squared-error": error.square(), "absolute-error": error.abs(), "targets": y, "squared-targets": y.square()}
        return {"samples": len(y), **{name: value.sum(0) for name, value in sums.items()}}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Compute R2, the mean squared error and the mean absolute error."""
        n, squares = sums["samples"], sums["squared-targets"]
        spread = squares - sums["targets"].square() / n
        varies = spread > 8 * torch.finfo(torch.float64).eps * squares
        r2 = (1 - sums["squared-error"] / spread)[varies].mean()
        return {"r2": float(r2), "mse": float((sums["squared-error"] / n).mean()), "mae": float((sums["absolute-error"] / n).mean())}
