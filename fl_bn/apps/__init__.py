"""The two Flower apps of fl-bn: ``fl_bn.apps.server:app`` and ``fl_bn.apps.client:app``.

They serve runs in one process. A folder for ``flwr run .`` makes its own with ``make_app(folder)``, so that a run config may name functions
of that folder's modules: server_app/ and client_app/ of the repository do.
"""
