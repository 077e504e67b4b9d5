"""Define BatchNorm layers: one class per way of normalising a training batch.

In evaluation, all are plain BatchNorm. ``frozen`` and ``observation`` are
attributes, which a training loop does not change by ``train()`` or by removing
hooks.

Inputs have 0 to 3 spatial dimensions, as in the replaced layer, and channels at
dimension 1.
"""

from __future__ import annotations

import copy
from collections.abc import Container
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from fl_bn.bn.hybrid import mixture, normalise, plain
from fl_bn.bn.kinds import Composed, Unconvertible, composed
from fl_bn.bn.moments import Moments, channel_moments, inside_transform
from fl_bn.bn.roles import batch_norms

M = TypeVar("M", bound=nn.Module)


class OwnBatchNorm(Composed, _BatchNorm):
    """Base of this project's BatchNorm layers.

    Attributes:
        frozen: whether the layer normalises with its running statistics and does
            not update them, also in training mode.
        observation: records the layer's inputs, if any. Copies have none.
        refills: whether ``reset_running_stats`` was called (by ``update_bn``, say).
            Training then works as in torch's BatchNorm, up to the next round.
    """

    frozen = refills = False
    observation: Any = None

    @property
    def training(self) -> bool:
        """Return whether the layer normalises as in training. If frozen, only when it ``refills``."""
        return bool(self.__dict__["training"]) and (self.refills or not self.frozen)

    @training.setter
    def training(self, mode: bool) -> None:
        self.__dict__["training"] = mode

    def reset_running_stats(self) -> None:
        """Set mean 0 and variance 1. Training then measures as torch's BatchNorm does."""
        super().reset_running_stats()
        self.refills = True

    def reset_parameters(self) -> None:
        """Set statistics and affine parameters to initial values; end ``refills``."""
        super().reset_parameters()
        vars(self).pop("refills", None)


class FrozenBatchNorm(OwnBatchNorm):
    """Normalise with the running statistics, even in training."""

    frozen = True


class SharedNorm(OwnBatchNorm):
    """Base of layers that normalise training batches unlike torch.

    Attributes:
        then: names of submodules (an activation, say) that the layer calls in turn
            on its output.
        held_with_affine: whether statistics count as frozen if the affine
            parameters are.
    """

    then: tuple[str, ...] = ()
    held_with_affine = True
    momentum: float
    running_mean: Tensor
    running_var: Tensor

    @classmethod
    def from_batch_norm(cls, layer: _BatchNorm) -> Self:
        """Make a layer of this class from ``layer``, with its tensors, mode, hooks and attributes.

        Raises:
            Unconvertible: ``layer`` has no running statistics, or
                ``momentum=None``.
        """
        if layer.running_mean is None or layer.momentum is None:
            raise Unconvertible(
                f"it has no running statistics (track_running_stats=False) or their cumulative average (momentum=None): {cls.__name__} "
                "needs them: build it with track_running_stats=True and a momentum such as 0.1, or choose fedavg, fedbn or gn"
            )
        new: Self = copy.deepcopy(layer)  # type: ignore[assignment]
        new.__class__ = composed(cls, type(layer))
        return new

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input`` (B, C, *), then call the submodules of ``then``."""
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        y = _BatchNorm.forward(self, input) if self.refills else self.normalised(input)
        for name in self.then:
            y = getattr(self, name)(y)
        return y

    def normalised(self, x: Tensor) -> Tensor:
        """Normalise ``x`` (B, C, *) with the subclass's statistics, scale and shift."""
        raise NotImplementedError

    def normalise_shared(self, x: Tensor) -> Tensor:
        """Normalise ``x`` (B, C, *) with the running statistics, without their gradient."""
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


class FederatedBatchNorm(SharedNorm):
    """Normalise with shared running statistics, also in training (FBN, Algorithm 2, line 3).

    They are constant during a round. ``observe`` records the batches' moments.
    """

    def normalised(self, x: Tensor) -> Tensor:
        """Normalise ``x`` (B, C, *) with the shared statistics, scale and shift."""
        if self.observation is not None:
            self.observation(self, x)
        return self.normalise_shared(x)


_OWN = ("weight", "bias", "mixing_logit", "running_mean", "running_var")


class HybridBatchNorm(SharedNorm):
    """Normalise with a learnable mixture of batch and shared statistics (HBN, equations 9, 10).

    In training, ``mean = a * batch + (1 - a) * shared`` with ``a =
    sigmoid(mixing_logit)``, and the same for the (biased) variance. Gradients flow
    through the batch statistics and ``a``. Evaluation uses the shared statistics
    alone.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._mix()

    @classmethod
    def from_batch_norm(cls, layer: _BatchNorm, fixed: float | None = None) -> Self:
        """Make a layer with mixing logits from ``layer``.

        ``fixed`` mixing logits do not learn. None: they start at 0 and learn.
        """
        new = super().from_batch_norm(layer)
        new._mix(fixed)
        return new

    def _mix(self, fixed: float | None = None) -> None:
        self.mixing_logit = nn.Parameter(torch.full_like(self.running_mean, fixed or 0.0), requires_grad=fixed is None)

    def normalised(self, x: Tensor) -> Tensor:
        """Normalise ``x`` (B, C, *) with the mixture; in evaluation, with the shared statistics."""
        if not self.training:
            if self.observation is not None:
                self.observation(self, x)
            return self.normalise_shared(x)
        if not x.numel():  # an expert of a mixture may get no sample of a batch
            return self.normalise_shared(x)
        if x.numel() <= x.shape[1]:
            raise ValueError(f"HybridBatchNorm needs more than 1 value per channel in training, but got {tuple(x.shape)}")
        transformed = inside_transform()
        batch = channel_moments(x if transformed else x.detach())
        if self.observation is not None:
            self.observation(self, x, batch)
        own, dtype = self._own(), batch[0].dtype
        if any(t is not None and t.dtype is not dtype for t in own):
            own = [t if t is None else t.to(dtype) for t in own]
        weight, bias, logit, mean, var = own
        return (plain if transformed else normalise)(x, (weight, bias), logit, (mean, var), batch, self.eps)

    def _own(self) -> list[Any]:
        """Return the tensors of ``_OWN``, faster than by the module's attributes."""
        tensors = {**self._parameters, **self._buffers}
        return [tensors[name] if name in tensors else getattr(self, name) for name in _OWN]

    @torch.no_grad()
    def normaliser(self, batch: Moments) -> Moments:
        """Return what normalises a batch of moments ``batch`` (HBN, equation 9)."""
        shared = (self.running_mean.double(), self.running_var.double())
        return Moments(batch.count, *mixture(torch.sigmoid(self.mixing_logit.double()), shared, (batch.mean, batch.var)))


CONSTANT = (FederatedBatchNorm, HybridBatchNorm)
"""Layers whose running statistics stay as the server sent them."""


class InstanceNorm(nn.GroupNorm):
    """Normalise every channel of every instance, without running statistics."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise every channel of every instance of ``x`` (B, C, *)."""
        if x.dim() < 3 or x[0, 0].numel() < 2:
            raise ValueError(
                f"instance normalisation of an input {tuple(x.shape)} has one value per instance and channel, "
                "so every output would be the bias: use method 'gn' or 'ln' for a model with BatchNorm after a linear layer"
            )
        return super().forward(x)


class Followed(Composed):
    """Call submodules, such as an activation, on a layer's output."""

    then: tuple[str, ...] = ()

    def forward(self, *args: Any, **named: Any) -> Any:
        """Call the layer, then the submodules of ``then`` in turn."""
        y = super().forward(*args, **named)
        for name in self.then:
            y = getattr(self, name)(y)
        return y


def followed(layer: M, source: nn.Module, then: tuple[str, ...]) -> M:
    """Make ``layer`` call on its output those submodules that ``source`` calls.

    Args:
        layer: the new layer, changed in place.
        source: the layer that it replaces.
        then: names of the submodules in turn; may be empty.
    """
    if not then:
        return layer
    for name in then:
        if not isinstance(getattr(source, name, None), nn.Module):
            raise Unconvertible(
                f"{type(source).__name__} has no submodule {name!r}, which register_batch_norm(then={list(then)}) names: correct the name"
            )
        setattr(layer, name, getattr(source, name))
    if not isinstance(layer, SharedNorm):
        layer.__class__ = composed(Followed, type(layer))
    layer.then = then  # type: ignore[assignment]
    return layer


def group_norm(layer: _BatchNorm, groups: int, kind: type[nn.GroupNorm] = nn.GroupNorm) -> nn.GroupNorm:
    """Make a GroupNorm of class ``kind`` with ``layer``'s affine parameters, dtype and device.

    ``groups`` 0 means one group per channel.

    Raises:
        Unconvertible: ``groups`` does not divide the number of channels.
    """
    groups = groups or layer.num_features
    if layer.num_features % groups:
        raise Unconvertible(f"{groups} groups do not divide {layer.num_features} channels: choose a divisor of every layer's width")
    return in_place_of(kind(groups, layer.num_features, layer.eps, layer.affine), layer)


def in_place_of(new: M, layer: _BatchNorm) -> M:
    """Give ``new`` the scale, shift, hooks and mode of ``layer``, where shapes agree."""
    for key in ("weight", "bias"):
        theirs, own = getattr(layer, key), getattr(new, key)
        if theirs is None:  # with torch's BatchNorm(bias=False), only the bias is missing
            setattr(new, key, None)
        else:
            values = theirs.clone() if own.shape == theirs.shape else own
            setattr(new, key, nn.Parameter(values.detach().to(theirs.device, theirs.dtype), theirs.requires_grad))
    for key in (name for name in vars(layer) if "_hooks" in name):
        setattr(new, key, copy.copy(vars(layer)[key]))
    return new.train(layer.training)


def freeze_statistics(model: nn.Module, frozen: bool = True, layers: Container[str] | None = None) -> None:
    """Freeze BatchNorm layers' running statistics, or end the freeze, in place.

    A frozen layer trains with its running statistics and does not update them
    (FixBN, stage II), whatever ``model.train()`` does. Affine parameters still
    learn. ``layers`` freeze, by default all. The freeze of the others ends, and
    every layer's ``refills``.
    """
    for name, layer in batch_norms(model).items():
        if isinstance(layer, OwnBatchNorm):
            vars(layer).pop("refills", None)
        freezes = frozen and (layers is None or name in layers)
        if not isinstance(layer, OwnBatchNorm):
            if freezes:
                layer.__class__ = composed(FrozenBatchNorm, type(layer))
        elif isinstance(layer, FrozenBatchNorm):
            if not freezes:
                layer.__class__ = type(layer).kind  # type: ignore[assignment]
        elif freezes:
            layer.frozen = True
        else:
            vars(layer).pop("frozen", None)


def mixes_samples(layer: _BatchNorm) -> bool:
    """Return whether ``layer`` now normalises a sample with its batch's statistics."""
    return not isinstance(layer, FederatedBatchNorm) and (layer.training or layer.running_mean is None)
