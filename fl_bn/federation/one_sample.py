"""Handle batches of one sample: they have no variance in a BatchNorm layer that gets only one value per channel.

If no layer normalises with the statistics of its batch, a batch of one sample needs no special care. This holds for FBN,
group and layer normalisation, and frozen rounds. In other rounds, fl-bn leaves out a loader's batch of one sample if some
layer would get only one value per channel. The batches that fl-bn itself draws for such rounds have at least two
samples. A last batch of one sample is merged into the batch before. A client with only one sample sits the round out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fl_bn.bn.roles import batch_norms
from fl_bn.federation.locality import Locality
from fl_bn.methods import Phase
from fl_bn.task import CLASSIFICATION, Task, batch_size, tensors_in, to_device

if TYPE_CHECKING:
    from fl_bn.federation.client import LocalRound

NO_VARIANCE = "more than 1 value per channel"  # in the messages of torch and of HBN's layer
ADVICE = (
    "One sample has no variance where BatchNorm normalises with its batch: let the loader leave it out (DataLoader(..., drop_last=True)), "
    "or take another batch size or a method without batch statistics (fbn, gn, ln)"
)


def batch_statistics(model: nn.Module, locality: Locality, phase: Phase) -> dict[str, nn.Module]:
    """Return the BatchNorm layers of the converted ``model`` that normalise with their batch's statistics in ``phase``, by name."""
    if locality.method.freezes_statistics(phase):
        return {}
    constant = locality.shared_statistics if locality.method.constant else ()
    return {name: layer for name, layer in batch_norms(model).items() if name not in constant}


def fewest(model: nn.Module, locality: Locality, phase: Phase) -> int:
    """Return the least number of samples in a batch that fl-bn draws: 2 if a layer needs batch statistics, else 1."""
    return 2 if batch_statistics(model, locality, phase) else 1


class Trainable:
    """Iterate over a loader's batches, but leave out batches of one sample on which BatchNorm cannot train.

    Such a sample gives a BatchNorm layer only one value per channel, which has no variance. Use this class
    inside the block ``with round.open()``.

    Args:
        round: The client's round.
        batches: The loader.
        task: Reads a batch.
        drawn: Whether fl-bn drew the batches. If so, every batch of one sample is left out where a layer normalises with
            its batch.

    Attributes:
        all: The batches as the loader gives them.
        left_out: The number of batches that were left out, in all passes so far.
    """

    def __init__(self, round: LocalRound, batches: Iterable[Any], task: Task = CLASSIFICATION, drawn: bool = False) -> None:
        self._round, self.all, self._task, self._drawn, self.left_out = round, batches, task, drawn, 0
        self._seen: dict[tuple[tuple[int, ...], ...], bool] = {}

    def __len__(self) -> int:
        """Return the number of batches in one pass, including those that are left out.

        Raises:
            TypeError: The loader does not have a length.
        """
        return len(self.all)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        for batch in self.all:
            if self._fits(batch):
                yield batch
            else:
                self.left_out += 1

    def _fits(self, batch: Any) -> bool:
        round = self._round
        x, y = self._task.read(batch)
        if batch_size(x, y) != 1:
            return True
        layers = {k: m for k, m in batch_statistics(round.model, round.network.locality, round.phase).items() if m.training}
        if self._drawn or not layers:
            return not layers
        if round.phase is Phase.EXCHANGE and round.steps == 0:
            return True  # FedTAN's first step normalises with the statistics of the cohort
        shape = tuple(tuple(part.shape) for part in tensors_in(x))
        if shape not in self._seen:
            self._seen[shape] = not without_variance(round.model, layers, to_device(x, next(round.model.parameters()).device), self._task)
        return self._seen[shape]


@torch.no_grad()
def without_variance(model: nn.Module, layers: Mapping[str, nn.Module], x: Any, task: Task = CLASSIFICATION) -> list[str]:
    """Return the names of the ``layers`` of ``model`` that get only one value per channel if the input is ``x``.

    The function runs a forward pass in evaluation mode, which leaves the model unchanged.
    """
    names: list[str] = []

    def reached(name: str, layer: nn.Module, args: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        seen = next(iter([*args, *named.values()]))
        if seen.numel() == seen.shape[1]:
            names.append(name)

    modes = {module: vars(module)["training"] for module in model.modules()}
    model.eval()
    try:
        with ExitStack() as hooks:
            for name, layer in layers.items():
                hooks.callback(layer.register_forward_pre_hook(partial(reached, name), with_kwargs=True).remove)
            task.forward(model, x)
    finally:
        for module, mode in modes.items():
            module.training = mode
    return names


@contextmanager
def advised() -> Iterator[None]:
    """Add a note with advice to the error that a layer raises for a batch of one sample, inside the ``with`` block."""
    try:
        yield
    except ValueError as error:
        if NO_VARIANCE in str(error):
            error.add_note(ADVICE)
        raise
