"""Run secure aggregation over Flower by the protocol SecAgg+."""
