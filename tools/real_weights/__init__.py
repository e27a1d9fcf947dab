"""A LLaVA checkpoint with a real decoder, to measure what rounding costs."""
