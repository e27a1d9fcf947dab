"""Benchmark of the LoRA operator against its baselines over a fixed grid."""
