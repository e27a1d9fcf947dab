"""GPU kernels of a step, in OpenAI's Triton language (the Python package `triton`).

`launch` and `draws` have the typed functions that the rest of the package calls. The other modules
have the kernels. Importing any of them needs the package `triton`, which CUDA builds of torch
include, so this package imports none of them. The language has nothing to do with NVIDIA's Triton
Inference Server.
"""
