"""Norm layers, one small class per way of normalising a training batch; in evaluation each is plain BatchNorm.

All take 1d, 2d and 3d inputs: channels at dimension 1. The names of their tensors are torch's, so a saved model loads into
the unconverted network (only the mixing logit has no counterpart there). ``observe`` measures what any BatchNorm layer sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from fl_bn.hybrid import looked_into, mixture, normalise, plain
from fl_bn.moments import Moments, channel_moments, pool
from fl_bn.roles import SharedStatisticsNorm, batch_norms

M = TypeVar("M", bound=nn.Module)


class Unconvertible(ValueError):
    """A layer cannot be replaced without changing what the network computes; the message says why and what to do."""


class _SharedNorm(SharedStatisticsNorm):
    """State common to the layers that normalise with statistics shared by all clients. Abstract."""

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True, spatial: tuple[int, ...] = ()
    ) -> None:
        super().__init__()
        self.num_features, self.eps, self.momentum, self.spatial = num_features, eps, momentum, spatial
        self.weight = nn.Parameter(torch.ones(num_features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features)) if affine else None
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    @classmethod
    def from_batch_norm(cls, layer: _BatchNorm) -> Self:
        """A layer of this class with the affine, statistics, dtype and device of ``layer``.

        Raises:
            Unconvertible: ``layer`` keeps no running statistics, or averages them cumulatively (``momentum=None``).
        """
        if layer.running_mean is None or layer.running_var is None:
            raise Unconvertible(
                f"track_running_stats=False leaves no statistics to share, but {cls.__name__} normalises with shared ones: "
                "build the layer with track_running_stats=True, or choose fedavg, fedbn or gn"
            )
        if layer.momentum is None:
            raise Unconvertible("momentum=None (cumulative average) has no federated counterpart: give a number, e.g. 0.1")
        spatial = {nn.BatchNorm1d: (0, 1), nn.BatchNorm2d: (2,), nn.BatchNorm3d: (3,)}.get(type(layer), ())
        new = cls(layer.num_features, layer.eps, layer.momentum, layer.affine, spatial)
        new.to(layer.running_mean.device, layer.running_mean.dtype)
        new.load_state_dict({**new.state_dict(), **_without_counter(layer)})
        return _like(new, layer)

    def check(self, x: Tensor) -> None:
        if x.dim() < 2 or x.shape[1] != self.num_features or (self.spatial and x.dim() - 2 not in self.spatial):
            wanted = " or ".join(f"(B, {self.num_features}{', *' * d})" for d in self.spatial or (0, 1, 2, 3))
            raise ValueError(f"{type(self).__name__} expects an input {wanted}, but got {tuple(x.shape)}")

    def normalise_shared(self, x: Tensor) -> Tensor:
        """Normalise ``x`` (B, C, *) with the running statistics: constants, no gradient flows through them."""
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.weight is not None}"


class FederatedBatchNorm(_SharedNorm):
    """BatchNorm that normalises with the shared running statistics, also in training (FBN, Algorithm 2, line 3).

    The statistics are constants of the round: the layer never updates them. Measure the training batches with ``observe``.
    """

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        return self.normalise_shared(x)


_OWN = ("weight", "bias", "mixing_logit", "running_mean", "running_var")


class HybridBatchNorm(_SharedNorm):
    """BatchNorm with a learnable mix of batch and shared statistics per channel (HBN, equations 7 and 9).

    Training: ``mean = a * batch + (1 - a) * shared`` and the same for the (biased) variance, ``a = sigmoid(mixing_logit)``,
    gradients through the batch statistics and ``a``. Evaluation: the shared statistics alone. ``a -> 1`` is
    ``nn.BatchNorm`` in training, ``a -> 0`` a frozen layer.

    Symbols: distribution factor -> sigmoid(mixing_logit).
    """

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True, spatial: tuple[int, ...] = ()
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, spatial)
        self.mixing_logit = nn.Parameter(torch.zeros(num_features))
        self._watchers: list[Callable[[Moments], None]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        if not self.training:
            return self.normalise_shared(x)
        if x.numel() <= x.shape[1]:
            raise ValueError(f"HybridBatchNorm needs more than 1 value per channel in training, but got {tuple(x.shape)}")
        transformed = looked_into()
        batch = channel_moments(x if transformed else x.detach())
        for watcher in self._watchers:
            watcher(Moments(x.numel() // x.shape[1], batch[0].detach().double(), batch[1].detach().double()))
        own, dtype = self._own(), batch[0].dtype
        if any(t is not None and t.dtype is not dtype for t in own):
            own = [t if t is None else t.to(dtype) for t in own]
        weight, bias, logit, mean, var = own
        return (plain if transformed else normalise)(x, (weight, bias), logit, (mean, var), batch, self.eps)

    def _own(self) -> list[Any]:
        """Weight, bias, mixing logit, running mean and variance, from where a Module keeps them: asking for an attribute takes longer."""
        found = {**self._parameters, **self._buffers}
        return [found[name] if name in found else getattr(self, name) for name in _OWN]

    @contextmanager
    def watched(self, watcher: Callable[[Moments], None]) -> Iterator[None]:
        """Tell ``watcher`` the moments of every training batch inside the block."""
        self._watchers.append(watcher)
        try:
            yield
        finally:
            self._watchers.remove(watcher)

    @torch.no_grad()
    def normaliser(self, batch: Moments) -> Moments:
        """Mean and variance that a training batch with the moments ``batch`` is normalised with (equation 7)."""
        shared = (self.running_mean.double(), self.running_var.double())
        return Moments(batch.count, *mixture(torch.sigmoid(self.mixing_logit.double()), shared, (batch.mean, batch.var)))


class InstanceNorm(nn.GroupNorm):
    """Instance normalisation as a GroupNorm of one channel per group: no statistics, refuses inputs without a spatial extent."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() < 3 or x[0, 0].numel() < 2:
            raise ValueError(
                f"instance normalisation of an input {tuple(x.shape)} has one value per instance and channel, "
                "so every output would be the bias: use gn or ln for layers after a linear layer"
            )
        return super().forward(x)


def group_norm(layer: _BatchNorm, groups: int, kind: type[nn.GroupNorm] = nn.GroupNorm) -> nn.GroupNorm:
    """A GroupNorm with the affine, dtype and device of ``layer``; ``groups`` 0 means one group per channel."""
    groups = groups or layer.num_features
    if layer.num_features % groups:
        raise Unconvertible(f"{groups} groups do not divide {layer.num_features} channels: choose a divisor of every layer's width")
    new = kind(groups, layer.num_features, layer.eps, layer.affine)
    if layer.affine:
        new.to(layer.weight.device, layer.weight.dtype)
        new.load_state_dict({**new.state_dict(), **{key: tensor.detach() for key, tensor in layer.named_parameters()}})
    return _like(new, layer)


def _without_counter(layer: _BatchNorm) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in layer.state_dict().items() if key != "num_batches_tracked"}


def _like(new: M, layer: _BatchNorm) -> M:
    for key in ("weight", "bias"):
        if getattr(layer, key) is None:  # the bias alone may be missing: torch's BatchNorm(bias=False)
            setattr(new, key, None)
        else:
            getattr(new, key).requires_grad_(getattr(layer, key).requires_grad)
    return new.train(layer.training)


def freeze_statistics(model: nn.Module) -> None:
    """Let every BatchNorm layer normalise with its running statistics and leave them alone; affine keeps training.

    Only the norm layers change: Dropout and everything else stay in the mode they are in (FixBN, stage II). A later
    ``model.train()`` undoes it.
    """
    for layer in batch_norms(model).values():
        layer.eval()


def inputs(layer: nn.Module, seen: Moments) -> Moments:
    """Raw moments of a layer's input, whatever it normalises with."""
    return seen


def normalisers(layer: nn.Module, seen: Moments) -> Moments:
    """Mean and variance that a layer in training normalises an input of moments ``seen`` with: HBN's mixture, any other layer's input."""
    return layer.normaliser(seen) if isinstance(layer, HybridBatchNorm) else seen


@contextmanager
def observe(model: nn.Module, measure: Callable[[nn.Module, Moments], Moments] = inputs) -> Iterator[dict[str, list[Moments]]]:
    """Record the moments of every BatchNorm layer during the ``with`` block: one ``Moments`` per forward pass, what ``measure`` makes of
    its input's. HBN's layer works out its input's moments in training anyway, and hands them over.

    Summarise with ``pooled``.
    """
    layers = batch_norms(model)
    observed: dict[str, list[Moments]] = {name: [] for name in layers}

    def record(name: str, layer: nn.Module, seen: Moments) -> None:
        observed[name].append(measure(layer, seen))

    def hook(name: str, layer: nn.Module, args: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        if not (isinstance(layer, HybridBatchNorm) and layer.training):
            record(name, layer, Moments.of(*args, *named.values()))

    with ExitStack() as stack:
        for name, layer in layers.items():
            stack.callback(layer.register_forward_pre_hook(partial(hook, name), with_kwargs=True).remove)
            if isinstance(layer, HybridBatchNorm):
                stack.enter_context(layer.watched(partial(record, name, layer)))
        yield observed


class Updates(dict[str, int]):
    """By BatchNorm layer, the forward passes that moved its running statistics."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        super().__init__(dict.fromkeys(layers, 0))
        self._layers, self._own = layers, {name: layer.running_mean for name, layer in layers.items()}
        self._others: dict[tuple[str, int], tuple[Any, int]] = {}

    def saw(self, name: str, mean: Any) -> None:
        """A pass with ``mean`` in the layer, which may be there for passes of no account: of ``unrecorded``, of ``functional_call``."""
        if mean is self._own[name]:
            self[name] += 1
        else:
            self._others[name, id(mean)] = mean, self._others.get((name, id(mean)), (mean, 0))[1] + 1

    def look(self) -> None:
        """No pass is under way: a tensor that is in its layer now is the layer's own, put there by ``model.to``, say."""
        for (name, _), (mean, passes) in self._others.items():
            if self._layers[name].running_mean is mean:
                self._own[name] = mean
                self[name] += passes
        self._others.clear()


@contextmanager
def count_updates(model: nn.Module, swapped: bool = False) -> Iterator[Updates]:
    """Count, by BatchNorm layer, the forward passes inside the block that move its running statistics: not those of ``unrecorded``.

    Where code replaces the layers' tensors several times, ``look`` has to be called in between. ``swapped``: also passes with other
    tensors in the layer's place (``torch.func.functional_call``).
    """
    layers = batch_norms(model)
    updates = Updates(layers)

    def hook(name: str, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        mean = layer.running_mean
        if not layer.training or mean is None:
            return
        if swapped:
            updates[name] += 1
        else:
            updates.saw(name, mean)

    handles = [layer.register_forward_pre_hook(partial(hook, name)) for name, layer in layers.items()]
    try:
        yield updates
    finally:
        updates.look()
        for handle in handles:
            handle.remove()


def pooled(observed: dict[str, list[Moments]]) -> dict[str, Moments]:
    """One ``Moments`` per layer that saw anything."""
    return {name: pool(parts) for name, parts in observed.items() if parts}
