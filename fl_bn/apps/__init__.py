"""Provide the two Flower apps of fl-bn: ``fl_bn.apps.server:app`` and ``fl_bn.apps.client:app``.

Runs in one process use both. A site that allows only installed code uses the
client's. An app folder for ``flwr run .`` makes its own apps with
``make_app(folder)``. Run configs may then name functions of its modules.
"""
