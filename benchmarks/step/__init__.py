"""Benchmark of one engine step against its roofline, part by part."""
