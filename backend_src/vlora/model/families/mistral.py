"""Mistral: the layers of Llama. `sliding_window` in the configuration applies to every layer."""

from typing import Any

from vlora.model.families.base import DecoderFamily, has_sliding_layers


def _sliding_window(text: Any) -> bool:
    return has_sliding_layers(text) or bool(getattr(text, "sliding_window", None))


MISTRAL = DecoderFamily("mistral", sliding_window=_sliding_window)
