"""Concurrent requests in process, over gRPC and on PEFT."""
