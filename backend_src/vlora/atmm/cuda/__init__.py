"""The LoRA operator (ATMM) on CUDA: the compiled library csrc/atmm/cuda as a backend of
`vlora.atmm.op`.

`library` mirrors the C interface. `choice` selects the kernels for a shape. `tables` holds the
arguments that the kernels read from device memory. `operator` makes the calls. Importing this
package needs only torch. The library is loaded when a call first has a tensor on a GPU.
"""
