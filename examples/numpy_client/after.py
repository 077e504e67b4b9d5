"""The app of ``before.py`` under fl-bn. ``FlowerClient`` and ``server_fn`` are unchanged; each app takes one line."""

from before import client_fn, server_fn
from client import make_net

from fl_bn.flower import legacy_client_app, legacy_server_app
from fl_bn.methods import fixbn

client_app = legacy_client_app(client_fn, fixbn())
server_app = legacy_server_app(server_fn, make_net, fixbn())
