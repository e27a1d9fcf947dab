"""ATMM on CUDA: the compiled library (csrc/atmm/cuda) as one more backend of `vlora.atmm.op`.

`library` mirrors the C interface, `choice` says which kernels a shape gets, `tables` is what the
kernels read of a device, `operator` the calls. Importing it needs torch alone; a library is looked
for when tensors on a device first ask for it.
"""
