"""Benchmark of servers with many adapters."""
