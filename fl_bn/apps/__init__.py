"""Provide the two Flower apps of fl-bn: ``fl_bn.apps.server:app`` and ``fl_bn.apps.client:app``.

Runs in one process use both. A site whose policy allows only installed code uses the client's. An app folder for
``flwr run .`` makes its own two apps with ``make_app(folder)``, as the repository's server_app/ and client_app/ do. Run
configs may then name functions of that folder's modules.
"""
