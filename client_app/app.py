"""Make the ClientApp for ``flwr run .`` in this folder, by ``fl_bn.app.client``.

Run configs may name functions in the modules of this folder.
"""

from pathlib import Path

from fl_bn.app.client import make_app

app = make_app(Path(__file__).parents[1])
