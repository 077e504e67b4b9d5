"""The layer-wise exchange: a call that averages over the cohort, and its carriers.

The carriers are gRPC, replay, and threads in one process.
"""
