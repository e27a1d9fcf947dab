"""Run one benchmark: `python -m benchmarks NAME`."""

from benchmarks.runner import main

main()
