"""The exchange over one gRPC stream per client: the service in the ServerApp's process, and its client."""
