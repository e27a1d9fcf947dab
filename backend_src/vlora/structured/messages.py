"""Messages between the engine's process and the processes of grammars, over packet sockets.

A grammar's process compiles its text once, and then has one matcher per answer. The engine sends
each token that is drawn, and gets the mask of the tokens that may follow. A process that exceeds a
limit ends; `vlora.fork_server` has the exit codes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

# Kinds of requests: compile the text that follows, begin an answer, add a token, end an answer.
COMPILE, OPEN, ADVANCE, CLOSE = b"C", b"O", b"A", b"X"
# Kinds of replies. After `STOPPED`, the answer is complete and no token may follow.
COMPILED, MASK, STOPPED, REFUSED = b"K", b"M", b"S", b"R"
# Request: kind, number of the matcher, and a token. For `COMPILE`, the two numbers are 0 and the
# size in bytes of the limits and the text, which follow.
REQUEST = struct.Struct("<cIq")
# Reply: kind, number of the matcher, and seconds of processor time. A mask or a message follows.
REPLY = struct.Struct("<cId")
# Limits, which precede the text: processor seconds for handling each message, and bytes of memory
# in addition to those that the process has when it gets the limits.
LIMITS = struct.Struct("<dQ")
PACKET_BYTES = 64 * 1024  # Size in bytes of the packets in which a text is sent.
# Maximum size of a reply in bytes. The mask of a vocabulary of 4 million tokens has this size.
MAX_REPLY_BYTES = 512 * 1024
# Number of masks that fit into a socket's buffer, so that a process can send them before the engine
# receives the first. A mask of 150,000 tokens has 19 kB. Linux's default socket buffer
# (`net.core.wmem_default`) holds 11 of them, and its usual maximum (`net.core.wmem_max`) holds 21.
QUEUED_MASKS = 128
MAX_MESSAGE_CHARACTERS = 400  # Maximum length of the message in a refusal.


@dataclass(frozen=True)
class TokenizerData:
    """Description of a tokenizer for the processes of grammars.

    json: content of `tokenizer.json`.
    tokens: bytes of each token in hexadecimal; "" for tokens that never appear in text.
    size: number of tokens in a mask. Those beyond `tokens` are never allowed.
    ends: ids of the tokens that end a text.
    """

    json: str
    tokens: tuple[str, ...]
    size: int
    ends: tuple[int, ...]
