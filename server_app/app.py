"""Provide the ServerApp of this folder for ``flwr run .``: that of ``fl_bn.apps.server``, with this folder's modules."""

from pathlib import Path

from fl_bn.apps.server import make_app

app = make_app(Path(__file__).parents[1])
