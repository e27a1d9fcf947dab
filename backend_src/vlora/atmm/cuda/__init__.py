"""The LoRA operator (ATMM) on CUDA: the compiled library csrc/atmm/cuda as a backend of
`vlora.atmm.op`.

`library` mirrors the C interface. `choice` selects the kernels for a shape. `tables` holds the
arguments that the kernels read from device memory. `operator` makes the calls. Importing this
package needs only torch. The library is searched for when a tensor on a device first needs it.
"""
