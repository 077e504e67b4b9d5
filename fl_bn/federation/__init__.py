"""The local loop, the server's averaging and its optimiser: everything a round computes, in plain torch."""
