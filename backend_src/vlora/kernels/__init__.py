"""Kernels of a step: products with the weights, embedding, norms, gate and argmax.

`ops` is the interface. `reference` contains an implementation of each kernel in plain
torch. `vlora.backends` chooses between the compiled kernels, the GPU kernels and the reference.
"""
