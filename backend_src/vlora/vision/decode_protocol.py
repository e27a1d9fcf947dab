"""Messages between the encoder's process and its decoder processes, over stream sockets.

For each request, the encoder's process sends `BEGIN`, the elements and `END`. For each picture of
an element, the decoder sends the pixels as a sealed memory file. Before decoding a large picture,
it sends the picture's size and waits for `PROCEED`. After an element it sends `DONE`, or `REFUSED`
with a message. A decoder that exceeds a limit ends: by `SIGPROF` for processor time, and with exit
code `OUT_OF_MEMORY` for memory. Nothing that a decoder sends is trusted, because it reads files
from strangers.
"""

from __future__ import annotations

import struct

BEGIN, IMAGE, FRAME, PROCEED, END = b"B", b"I", b"F", b"G", b"E"
"""Kinds of requests. An element is an `IMAGE` or a `FRAME`."""

SIZE, PIXELS, DONE, REFUSED = b"S", b"P", b"D", b"X"
"""Kinds of replies."""

REQUEST = struct.Struct("<cHQ")
"""Header of a request: kind, number of bytes of the element's name, number of bytes of its data.
The name and the data follow the header.
"""

LIMITS = struct.Struct("<dQQ")
"""Data of `BEGIN`: processor seconds, bytes of memory, bytes of an encoded file."""

REPLY = struct.Struct("<cII")
"""Reply: kind and two numbers. For `SIZE` and `PIXELS`, the numbers are width and height. For
`REFUSED`, they are the number of bytes of the message that follows, and 0.
"""

SMALL_PIXELS = 4 * 1024**2
"""Maximum number of pixels of a picture that is decoded without waiting for `PROCEED`.

Waiting for it costs one more wake-up of each process.
"""

MAX_MESSAGE_BYTES = 4096
"""Maximum size of a message in a reply."""
