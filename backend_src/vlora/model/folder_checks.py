"""Checks of a checkpoint folder that need neither torch nor transformers.

`vlora serve` makes them before it starts a server, in well under a second. The models make them
again, because a server can be started without that command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlora.errors import InvalidArgument, shown
from vlora.strict_json import load_object

# Levels of nesting in a file of a checkpoint. Configurations need about ten.
MAX_DEPTH = 64

GENERATION_CONFIG = "generation_config.json"


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} without a file. Raise InvalidArgument, which names it,
    for anything else.
    """
    try:
        text = file.read_text(encoding="utf-8") if file.is_file() else "{}"
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"model: {file} cannot be read: {error}") from error
    return load_object(text, f"model: {file}", MAX_DEPTH)


def end_tokens(folder: Path) -> tuple[int, ...] | None:
    """Return the end-of-text tokens that a folder's generation config lists; None for no list."""
    file = folder / GENERATION_CONFIG
    tokens = read_object(file).get("eos_token_id")
    if tokens is None:
        return None
    ids = tokens if isinstance(tokens, list) else [tokens]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise InvalidArgument(
            f"model: {file}: 'eos_token_id' must be a token id or a list of them, not"
            f" {shown(tokens)}"
        )
    return tuple(ids)
