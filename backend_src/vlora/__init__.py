"""V-LoRA: one large multimodal model, many LoRA adapters, served to vision applications."""

__version__ = "0.1.0"
