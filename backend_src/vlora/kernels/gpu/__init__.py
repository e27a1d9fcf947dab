"""GPU kernels of a step, in OpenAI's Triton language, unrelated to NVIDIA's Triton server.

`launch` and `draws` contain the functions that the rest of the package calls. All modules here
import the package `triton`, which only CUDA builds of torch include.
"""
