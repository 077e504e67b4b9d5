"""The layer-wise exchange: clients average a vector over their cohort during a forward or backward pass.

``call`` defines the operation and ``session`` the server's half. A carrier takes requests to the server and
answers back. There are three: a gRPC service, replay in Flower messages, and threads in one process.
"""
