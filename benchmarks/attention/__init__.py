"""Benchmark of attention over KV pages, compared with torch's attention and the roofline."""
