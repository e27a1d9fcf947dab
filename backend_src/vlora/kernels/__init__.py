"""The step's own kernels: products, attention over pages, and what lies between them.

`ops` is the interface and `reference` has the readable twin of each; `vlora.backends` chooses
between them.
"""
