"""`make gpu`: build, test, search and measure ATMM on a GPU in one command of 9 minutes.

It needs Python, torch with CUDA, pytest, nvcc and the CUTLASS headers. It installs and downloads
nothing, and imports only `vlora.atmm` and the operators of `benchmarks`. `stages` runs and resumes
stages, and `__main__` defines them.
"""
