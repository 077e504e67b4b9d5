"""Provide the two Flower apps of fl-bn: ``fl_bn.apps.server:app`` and ``fl_bn.apps.client:app``.

They are for runs in one process. An app folder for ``flwr run .`` makes its own two apps with ``make_app(folder)``. Run
configs may then name functions of that folder's modules. The repository's server_app/ and client_app/ do so.
"""
