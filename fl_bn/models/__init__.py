"""Make networks with batch normalisation, by name."""

from fl_bn.models.build import MODELS, build, without_dropout

__all__ = ["MODELS", "build", "without_dropout"]
