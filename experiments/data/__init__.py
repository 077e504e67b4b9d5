"""Load the papers' data sets, make their feature shifts, and make artificial copies of them."""
