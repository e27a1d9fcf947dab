"""Llama: the configuration states which projections have a bias."""

from vlora.model.families.base import DecoderFamily

LLAMA = DecoderFamily("llama")
