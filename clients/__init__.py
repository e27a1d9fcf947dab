"""Clients of the server. They need tritonclient, numpy and Pillow, and av to read video files."""
