"""Run secure aggregation over Flower: the protocol SecAgg+, and the vectors that it sums."""
