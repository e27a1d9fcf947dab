"""Llama: biases as the configuration says."""

from vlora.model.families.base import DecoderFamily

LLAMA = DecoderFamily("llama")
