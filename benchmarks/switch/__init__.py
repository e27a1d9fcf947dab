"""Benchmark of merging, switching adapters and deLoRA."""
