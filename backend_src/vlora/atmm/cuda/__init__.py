"""ATMM on CUDA: the compiled library (csrc/atmm/cuda) as another backend of `vlora.atmm.op`.

`library` mirrors the C interface, `choice` selects the kernels of a shape, `tables` holds the
arguments that the kernels read from device memory, and `operator` makes the calls. Importing this
package needs torch only; a library is searched for when tensors on a device first need it.
"""
