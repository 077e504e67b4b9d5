"""The ServerApp of this folder, for ``flwr run .``: that of ``fl_bn.apps.server``, with the modules that lie here as its own."""

from pathlib import Path

from fl_bn.apps.server import make_app

app = make_app(Path(__file__).parents[1])
