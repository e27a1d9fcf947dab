"""Benchmark of merging adapters, switching between them, and mixture mode (deLoRA)."""
