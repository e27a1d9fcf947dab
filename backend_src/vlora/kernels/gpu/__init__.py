"""GPU kernels of a step, in OpenAI's Triton language (the Python package `triton`).

`launch` and `draws` contain the typed functions that the rest of the package calls. The other
modules contain the kernels. All of these modules import the package `triton`, which only CUDA
builds of torch include, so this file imports none of them. The language is unrelated to NVIDIA's
Triton Inference Server.
"""
