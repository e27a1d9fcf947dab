"""Attention over KV pages against its reference implementation and the roofline."""
