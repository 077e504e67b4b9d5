"""Define a Flower app whose BatchNorm works on clients that differ."""
