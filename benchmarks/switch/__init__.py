"""Merging, switching adapters and deLoRA."""
