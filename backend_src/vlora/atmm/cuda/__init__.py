"""ATMM on CUDA: the compiled library (csrc/atmm/cuda) as one more backend of `vlora.atmm.op`.

`library` mirrors the C interface, `choice` says which kernels a shape gets, `operator` holds what
lies on a device. Nothing here is imported unless tensors on a device, or a test, ask for it.
"""
