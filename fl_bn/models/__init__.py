"""Make networks with batch normalisation, by name."""

from fl_bn.models.build import MODELS, build

__all__ = ["MODELS", "build"]
