"""Load tests of a running server with the real perf_analyzer."""
