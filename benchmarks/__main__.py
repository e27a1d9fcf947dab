"""Run one benchmark: `python -m benchmarks NAME`."""

from benchmarks.frame import main

main()
