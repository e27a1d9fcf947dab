"""Load tests with the real perf_analyzer."""
