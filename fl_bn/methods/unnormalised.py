"""Scale and shift as BatchNorm does, but do not normalise, for networks without normalisation."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase


class ScaleShift(_NormBase):
    """Compute ``x * weight + bias`` for inputs (B, C, *). If ``num_features`` is 1, all channels share one weight and one bias.

    The class derives from torch's norm layers, although it does not normalise. So its tensors have the roles of a norm
    layer's tensors (``fl_bn.bn.roles``).
    """

    def forward(self, x_BC: Tensor) -> Tensor:
        """Scale and shift ``x_BC``."""
        shape = (1, -1, *([1] * (x_BC.dim() - 2)))
        if self.weight is not None:
            x_BC = x_BC * self.weight.view(shape)
        return x_BC if self.bias is None else x_BC + self.bias.view(shape)

    def extra_repr(self) -> str:
        """Describe the layer, for printing a network."""
        return f"{self.num_features}, weight={self.weight is not None}, bias={self.bias is not None}"


def per_channel(layer: _BatchNorm) -> ScaleShift:
    """Make a ``ScaleShift`` with the scale and shift of ``layer``."""
    new = _in_place_of(layer, layer.num_features)
    if layer.affine:
        new.load_state_dict({**new.state_dict(), **{key: tensor.detach() for key, tensor in layer.named_parameters()}})
    return new


def scalars(layer: _BatchNorm) -> ScaleShift:
    """Make a ``ScaleShift`` with one multiplier of 1 and one bias of 0, instead of the scale and shift of ``layer``."""
    return _in_place_of(layer, 1)


def _in_place_of(layer: _BatchNorm, features: int) -> ScaleShift:
    new = ScaleShift(features, layer.eps, 0.1 if layer.momentum is None else layer.momentum, layer.affine, track_running_stats=False)
    for key in ("weight", "bias"):
        if (theirs := getattr(layer, key)) is None:
            setattr(new, key, None)
        else:
            setattr(new, key, nn.Parameter(getattr(new, key).detach().to(theirs.device, theirs.dtype), theirs.requires_grad))
    return new.train(layer.training)
