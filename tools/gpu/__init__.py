"""`make gpu`, and the checks and predictions of the GPU kernels that need no GPU."""
