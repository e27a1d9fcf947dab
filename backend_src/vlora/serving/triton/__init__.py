"""The only package that imports Triton's Python backend.

It adapts Triton's objects to the services. The services make all decisions, and run and are tested
without Triton. Attributes of `triton_python_backend_utils` are read inside functions only, because
Triton sets them after it has imported the model's file and before it calls `initialize`.
"""
