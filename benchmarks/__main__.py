"""`python -m benchmarks NAME`: run one benchmark."""

from benchmarks.cli import bench_app

bench_app()
