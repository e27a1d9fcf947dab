"""The demo checkpoint: its scenes, its training, its adapters, and the measure of all three."""
