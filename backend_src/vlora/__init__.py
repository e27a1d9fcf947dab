"""V-LoRA: one large multimodal model, many LoRA adapters, served to vision applications."""

__version__ = "0.2.0"

from vlora import openmp_env

openmp_env.set_policy()
