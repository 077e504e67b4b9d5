"""Record the learning rates of a user's own optimisers, and check that these optimisers suit the objective."""

from __future__ import annotations

from torch.optim import SGD, Optimizer

from fl_bn.objectives import Objective


class StepRates:
    """Record the learning rates of one round's steps.

    Args:
        objective: The local objective.
        planned: The learning rate of the instruction.
    """

    def __init__(self, objective: Objective, planned: float) -> None:
        self._objective, self._planned = objective, planned
        self._rates: list[float] = []

    def record(self, optimizer: Optimizer, goes_on: bool = False) -> None:
        """Record the learning rate of a step of ``optimizer``. An optimiser without a learning rate leaves nothing to record.

        Args:
            optimizer: The optimiser.
            goes_on: Whether a second optimiser made this step after the same backward pass. If so, it belongs to the local step before.

        Raises:
            ValueError: The objective needs plain SGD with one learning rate. But ``optimizer`` is not SGD, has momentum or
                ``maximize=True``, has several rates, or has another rate than the optimiser of the step that goes on.
        """
        check_optimizer(self._objective, optimizer)
        rate = optimizer.param_groups[0].get("lr")
        if rate is None:
            return
        if goes_on and self._objective.travels and self._rates and float(rate) != self._rates[-1]:
            raise _several(self._objective, sorted({self._rates[-1], float(rate)}))
        self._rates.append(float(rate))

    @property
    def last(self) -> float | None:
        """Return the learning rate of the last step; None if no step was recorded."""
        return self._rates[-1] if self._rates else None

    @property
    def mean(self) -> float:
        """Return the mean learning rate of the steps. Without a recorded step, return the instruction's rate."""
        seen = set(self._rates) or {self._planned}
        return seen.pop() if len(seen) == 1 else sum(self._rates) / len(self._rates)


def check_optimizer(objective: Objective, optimizer: Optimizer) -> None:
    """Check that ``optimizer`` suits ``objective``.

    Raises:
        ValueError: The objective needs plain SGD with one learning rate. But ``optimizer`` is not SGD, has momentum or
            ``maximize=True``, or has several rates.
    """
    if not objective.travels:
        return
    if not isinstance(optimizer, SGD) or any(group["momentum"] for group in optimizer.param_groups):
        raise ValueError(
            f"{objective.name}'s control variates are means of the gradients of plain SGD, but the optimiser is "
            f"{type(optimizer).__name__}{' with momentum' * isinstance(optimizer, SGD)}: take torch.optim.SGD without momentum"
        )
    if any(group["maximize"] for group in optimizer.param_groups):
        raise ValueError(f"{objective.name} lowers the loss, but the optimiser has maximize=True: change the sign of the loss instead")
    if len(rates := sorted({float(group["lr"]) for group in optimizer.param_groups})) > 1:
        raise _several(objective, rates)


def _several(objective: Objective, rates: list[float]) -> ValueError:
    return ValueError(
        f"{objective.name}'s control variates are changes of weights divided by one learning rate, but the loop steps with the rates "
        f"{', '.join(f'{rate:g}' for rate in rates)}: give all parameters the same rate"
    )
