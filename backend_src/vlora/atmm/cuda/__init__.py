"""The LoRA operator (ATMM) on CUDA: the compiled library csrc/atmm/cuda as a backend of
`vlora.atmm.op`. The library is loaded when a call first has a tensor on a GPU.
"""
