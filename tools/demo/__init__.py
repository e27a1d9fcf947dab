"""The demo checkpoint and its adapters: scenes, training and evaluation."""
