"""The step's own kernels: products, attention over pages, and what lies between them.

`ops` is the interface, `reference` the readable twin of each, `backends` decides which one serves.
"""
