"""The LoRA operator against its baselines over a fixed grid."""
