"""The step's kernels: products, paged attention, and the operations between them.

`ops` is the interface and `reference` holds a plain-torch implementation of each operation;
`vlora.backends` chooses between the compiled kernels and the reference.
"""
