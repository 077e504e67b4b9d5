"""Run the layer-wise exchange over gRPC: ``service`` in the ServerApp's process, ``client`` at a client."""
