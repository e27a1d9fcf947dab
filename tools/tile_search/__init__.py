"""Algorithm 2 of the paper: which tile is best for which shape, found by profiling."""
