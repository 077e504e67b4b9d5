"""Stack the tensors of networks of one kind, and run all by one call (``torch.func.vmap``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fl_bn.bn.moments import Moments
from fl_bn.bn.roles import inputs_like

Seen = Mapping[str, Sequence[Sequence[Moments]]]
"""Layer -> for each row its moments, one ``Moments`` per forward pass."""


class _Holder(nn.Module):
    """Wrap ``answer``, of network and batch, as the module ``functional_call`` needs."""

    def __init__(self, model: nn.Module, answer: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self._answer = model, answer

    def forward(self, *batch: Tensor) -> Tensor:
        return self._answer(self.model, *batch)


class Stack:
    """Hold the tensors of K networks, stacked along a first axis (K, ...), on ``template``'s device.

    All rows run with ``template``'s modes and hooks. The stacked ``parameters`` are
    leaf tensors, so that an elementwise optimiser steps all rows at once.
    """

    def __init__(self, models: Sequence[nn.Module], template: nn.Module) -> None:
        self.template, self.rows = template, len(models)
        self.parameters = {
            name: nn.Parameter(tensor, own.requires_grad)
            for (name, own), tensor in zip(template.named_parameters(), _stacked(models, nn.Module.named_parameters, template), strict=True)
        }
        buffers = _stacked(models, nn.Module.named_buffers, template)
        self.buffers = dict(zip((name for name, _ in template.named_buffers()), buffers, strict=True))

    def run(
        self,
        rows: Sequence[int],
        answer: Callable[..., Tensor],
        batch: Sequence[Tensor],
        observed: Mapping[str, list[Moments]],
    ) -> tuple[Tensor, Seen]:
        """Run ``answer(network, *batch)`` for networks ``rows``, and update their buffers.

        ``batch`` is stacked: (len(rows), B, ...). The template's hooks fill the
        lists of ``observed`` by layer, which are empty afterwards. Return the
        stacked results, and layer -> each row's moments.

        Raises:
            RuntimeError: The forward pass draws random numbers, or cannot be
                stacked.
        """
        counts: dict[str, list[int]] = {}

        def one(parameters: dict[str, Tensor], buffers: dict[str, Tensor], *batch: Tensor) -> tuple[Tensor, dict[str, Tensor], Any]:
            state = {f"model.{name}": tensor for name, tensor in (parameters | buffers).items()}
            result = functional_call(_Holder(self.template, answer), state, batch)  # it leaves changed buffers in ``state``
            moments = {name: [(part.mean, part.var) for part in parts] for name, parts in observed.items()}
            counts.update({name: [part.count for part in parts] for name, parts in observed.items()})
            for parts in observed.values():
                parts.clear()
            return result, {name: state[f"model.{name}"] for name in buffers}, moments

        index = self._index(rows)
        parameters = {name: tensor if index is None else tensor[index] for name, tensor in self.parameters.items()}
        buffers = {name: tensor if index is None else tensor[index].clone() for name, tensor in self.buffers.items()}
        result, buffers, moments = vmap(one, randomness="error")(parameters, buffers, *batch)
        for name, tensor in buffers.items():
            if index is None:
                self.buffers[name] = tensor.detach().contiguous()
            else:
                self.buffers[name][index] = tensor.detach()
        seen = {
            name: [
                [Moments(n, means_kC[k], vars_kC[k]) for n, (means_kC, vars_kC) in zip(counts[name], parts, strict=True)]
                for k in range(len(rows))
            ]
            for name, parts in moments.items()
        }
        return result, seen

    def _index(self, rows: Sequence[int]) -> slice | Tensor | None:
        """Index ``rows``: None for all, a slice for the first ones, else a tensor."""
        if list(rows) == list(range(len(rows))):
            return None if len(rows) == self.rows else slice(len(rows))
        return torch.tensor(rows, device=next(iter(self.parameters.values())).device)


def groups(batches: Mapping[int, Sequence[Tensor]]) -> Iterator[tuple[list[int], tuple[Tensor, ...]]]:
    """Yield rows whose ``batches`` have equal shapes, and their stacked batches."""
    by_shape: dict[Any, list[int]] = {}
    for row, parts in batches.items():
        by_shape.setdefault(tuple(part.shape for part in parts), []).append(row)
    for rows in by_shape.values():
        yield rows, tuple(torch.stack(parts) for parts in zip(*(batches[row] for row in rows), strict=True))


def _stacked(
    models: Sequence[nn.Module], named: Callable[[nn.Module], Iterable[tuple[str, Tensor]]], template: nn.Module
) -> Iterator[Tensor]:
    device = inputs_like(template).device
    for tensors in zip(*([tensor for _, tensor in named(model)] for model in models), strict=True):
        yield torch.stack([tensor.detach().contiguous() for tensor in tensors]).to(device)  # vmap may not know channels last
