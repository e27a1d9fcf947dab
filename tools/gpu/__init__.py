"""`make gpu`: build, test, search and measure ATMM on a GPU with one command in 9 minutes.

The command needs Python, torch with CUDA, pytest, nvcc and the CUTLASS headers. It installs and
downloads nothing. `__main__` defines the stages; `stages` runs and resumes them.
"""
