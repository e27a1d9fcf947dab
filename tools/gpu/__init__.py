"""`make gpu`: everything about ATMM on CUDA that only a GPU can show, in one command of 9 minutes.

Needs Python, torch with CUDA, pytest, nvcc and the CUTLASS headers; nothing is installed or
fetched, and of vlora only `atmm` and the operators of `bench` are imported. `stages` runs and
resumes, `__main__` lists what is run.
"""
