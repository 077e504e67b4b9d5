"""Make networks with batch normalisation, by name."""

from fl_bn.models.build import MODELS, build, is_torchvision

__all__ = ["MODELS", "build", "is_torchvision"]
