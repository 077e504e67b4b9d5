"""Provide the ClientApp of this folder for ``flwr run .``: that of ``fl_bn.apps.client``, with this folder's modules."""

from pathlib import Path

from fl_bn.apps.client import make_app

app = make_app(Path(__file__).parents[1])
