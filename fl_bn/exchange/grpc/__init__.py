"""Run the layer-wise exchange over gRPC, with one stream per client.

``service`` runs in the ServerApp's process. ``client`` is the client's side.
"""
