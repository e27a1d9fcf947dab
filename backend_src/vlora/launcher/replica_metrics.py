"""One page of the metrics of all replicas, in which each sample has the label `replica`."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6
from types import TracebackType

from vlora.net import get

READ_SECONDS = 5.0
_COMMENT = re.compile(r"# (?:HELP|TYPE) (\S+)")
_SAMPLE = re.compile(r"([^\s{]+)(?:\{(.*)\})? (\S+.*)")

Urls = Callable[[], Mapping[str, str]]  # Returns the URL of the metrics of each serving replica.


def joined(pages: Mapping[str, str]) -> str:
    """Return one page of the pages by replica, with the samples of each metric together."""
    comments: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, page in pages.items():
        family = ""
        for line in page.splitlines():
            if comment := _COMMENT.match(line):
                family = comment[1]
                known = comments.setdefault(family, [])
                if line not in known:
                    known.append(line)
            elif sample := _SAMPLE.fullmatch(line):
                labels = ",".join(filter(None, (f'replica="{replica}"', sample[2])))
                text = f"{sample[1]}{{{labels}}} {sample[3]}"
                samples.setdefault(family, []).append(text)
    lines = [line for name in samples for line in (*comments.get(name, ()), *samples[name])]
    return "".join(f"{line}\n" for line in lines)


class MetricsServer:
    """Serves the page at `/metrics` within a `with` block."""

    def __init__(self, host: str, port: int, urls: Urls) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = self.path == "/metrics"
                body = _read(urls()).encode() if found else b""
                self.send_response(200 if found else 404)
                self.send_header("content-type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *words: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            address_family = AF_INET6 if ":" in host else AF_INET

        self._server = Server((host, port), Handler)

    def __enter__(self) -> MetricsServer:
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


def _read(urls: Mapping[str, str]) -> str:
    pages = {}
    for replica, url in urls.items():
        # A replica that has just ended has no page.
        with suppress(OSError):
            pages[replica] = get(url, READ_SECONDS, direct=True).decode()
    return joined(pages)
