"""Tokenizer of a checkpoint folder.

Qwen and Qwen-VL were published with `qwen.tiktoken`, a list of tokens by rank, and with code that
reads it. This module reads the list with transformers' converter instead, and never runs that code.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from vlora.errors import InvalidArgument

RANKS = "qwen.tiktoken"
EXTRA_TOKENS = 205
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *(f"<|extra_{number}|>" for number in range(EXTRA_TOKENS)),
    "<ref>",
    "</ref>",
    "<box>",
    "</box>",
    "<quad>",
    "</quad>",
    "<img>",
    "</img>",
    "<imgpad>",
)
"""Special tokens of Qwen-VL, whose ids follow the ranks."""

_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CHAT = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant."
    "<|im_end|>\n{% endif %}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class _Converter(TikTokenConverter):  # type: ignore[misc]
    """transformers' converter of tiktoken files, changed to work without the package tiktoken."""

    @staticmethod
    def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
        """Return the rank of each token in a file."""
        ranks = {}
        for line in Path(tiktoken_url).read_bytes().splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        return ranks


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a checkpoint folder. Code in the folder is never run.

    Raises InvalidArgument for a `qwen.tiktoken` that cannot be read.
    """
    file = folder / RANKS
    if (folder / "tokenizer.json").is_file() or not file.is_file():
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    try:
        converted = _Converter(str(file), _PATTERN).converted()
    except (OSError, ValueError, binascii.Error) as error:
        raise InvalidArgument(f"{file} cannot be read: {error}") from error
    converted.normalizer = normalizers.NFC()
    converted.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=converted, eos_token=SPECIAL_TOKENS[0], chat_template=_CHAT
    )
