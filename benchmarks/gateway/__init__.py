"""Benchmark of the gateway's cost, compared with gRPC to the server itself."""
