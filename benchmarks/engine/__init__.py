"""Benchmark of concurrent requests in process, over gRPC and on PEFT."""
