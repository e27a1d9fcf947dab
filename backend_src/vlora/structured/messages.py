"""Messages between the engine's process and the processes of grammars, over packet sockets.

A process that exceeds a limit ends; `vlora.fork_server` has the exit codes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

# Requests: compile a text, begin an answer, add a token, end an answer.
COMPILE, OPEN, ADVANCE, CLOSE = b"C", b"O", b"A", b"X"
# Replies. After STOPPED, no token may follow.
COMPILED, MASK, STOPPED, REFUSED = b"K", b"M", b"S", b"R"
# Kind, matcher, token. For COMPILE: 0, and the size of the limits and the text that follow.
REQUEST = struct.Struct("<cIq")
REPLY = struct.Struct("<cId")  # Kind, matcher, processor seconds. A mask or a message follows.
# Processor seconds per message, and bytes of memory beyond the present ones. The text follows.
LIMITS = struct.Struct("<dQ")
PACKET_BYTES = 64 * 1024  # Size of the packets in which a text is sent.
MAX_REPLY_BYTES = 512 * 1024  # A mask of a vocabulary of 4 million tokens has this size.
# Number of masks that fit into a socket's buffer, so that a process can send them before the engine
# receives the first. Linux's default holds 11 masks of 150,000 tokens, its usual maximum 21.
QUEUED_MASKS = 128
MAX_MESSAGE_CHARACTERS = 400


@dataclass(frozen=True)
class TokenizerData:
    """Description of a tokenizer for the processes of grammars.

    json: content of `tokenizer.json`.
    tokens: bytes of each token in hexadecimal; "" for tokens that never appear in text.
    size: number of tokens in a mask. Those beyond `tokens` are never allowed.
    """

    json: str
    tokens: tuple[str, ...]
    size: int
    ends: tuple[int, ...]
