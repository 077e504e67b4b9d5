"""Provide the ServerApp for ``flwr run .`` in this folder.

It is that of ``fl_bn.apps.server``. Run configs may name functions of the modules in this folder.
"""

from pathlib import Path

from fl_bn.apps.server import make_app

app = make_app(Path(__file__).parents[1])
