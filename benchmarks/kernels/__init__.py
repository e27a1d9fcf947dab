"""Benchmark of the LoRA operator, compared with its baselines over a fixed grid."""
