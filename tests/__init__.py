"""A package, so that no other of the name is found first where many are installed."""
