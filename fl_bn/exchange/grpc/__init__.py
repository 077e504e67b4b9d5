"""Run the layer-wise exchange over gRPC: ``service`` at the server, ``client`` at a client."""
