"""The layer-wise exchange: clients average a vector over their cohort during a forward or backward pass.

``call`` defines the operation and ``session`` the server's half. Three carriers take requests to the server
and answers back: a gRPC service, replay in Flower messages, and threads in one process.
"""
