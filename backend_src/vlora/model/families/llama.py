"""Llama: biases only where the configuration asks for them."""

from vlora.model.families.base import DecoderFamily

LLAMA = DecoderFamily("llama")
