"""A checkpoint with the sizes of a 7B model, and what serving it costs."""
