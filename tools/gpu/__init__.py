"""`make gpu`: build, test, search and measure ATMM on a GPU with one command in 9 minutes.

It needs Python, torch with CUDA, pytest, nvcc and the CUTLASS headers. It installs and downloads
nothing, and imports only `vlora.atmm` and the operators of `benchmarks`. `__main__` defines the
stages; `stages` runs and resumes them.
"""
