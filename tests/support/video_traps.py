"""A file and an address that nothing may open, and files that name them."""

from __future__ import annotations

import base64
import ctypes
import os
import socket
from pathlib import Path

from tests.support import video_files as files


class Trap:
    """A file and an address that nothing may open."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "canary.mov"
        self.path.write_bytes(files.video("h264", "mov"))
        self._events = ctypes.CDLL(None).inotify_init1(os.O_NONBLOCK)
        opened = 0x20  # IN_OPEN
        ctypes.CDLL(None).inotify_add_watch(self._events, bytes(self.path), opened)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setblocking(False)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/a"

    def sprung(self) -> bool:
        """Return whether the file or the address was opened since the last call."""
        try:
            return bool(os.read(self._events, 4096))
        except BlockingIOError:
            pass
        try:
            self._socket.accept()[0].close()
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        os.close(self._events)
        self._socket.close()


def lures(trap: Trap) -> dict[str, bytes]:
    """Return files that name the trap's file or address, by kind."""
    playlist = "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{}\n#EXT-X-ENDLIST\n"
    ffconcat = "ffconcat version 1.0\nfile '{}'\n"
    mov = files.video("h264", "mov")
    texts = {
        f"{kind} of {target}": text.format(target).encode()
        for target in (str(trap.path), f"file:{trap.path}", trap.url)
        for kind, text in (("hls", playlist), ("concat", ffconcat), ("url", "{}"))
    }
    return texts | {
        # The first bytes of an accepted format, then the playlist.
        "hls in mov": files.box(b"ftyp", b"isom") + texts[f"hls of {trap.path}"],
        "hls in ts": b"G" + b"\xff" * 187 + b"G" + bytes(187) + b"G" + texts[f"hls of {trap.url}"],
        "hls in matroska": b"\x1a\x45\xdf\xa3" + texts[f"hls of {trap.path}"],
        "base64": base64.b64encode(texts[f"hls of {trap.path}"]),
        "alias": files.mov_that_refers_to(str(trap.path), mov),
        "relative alias": files.mov_that_refers_to(trap.path.name, mov),
        "alias to an address": files.mov_that_refers_to(trap.url, mov),
    }
