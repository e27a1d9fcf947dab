"""The only package that imports Triton's Python backend.

It adapts Triton's objects to the services, and makes no decisions of its own: those are the
services', which run and are tested without Triton.
"""
