"""A Flower app in the shape of the baseline niid_bench."""
