"""Clients of the server; they need tritonclient, numpy and Pillow (and av for video files)."""
