"""Answers of cameras, and receivers of their events: a webhook and an MQTT broker."""

from __future__ import annotations

import io
import json
import shutil
import signal
import socket
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.polling import until
from vlora.net import choose_ports
from vlora.watch.answers import Answer, CameraView


def jpeg(seed: int = 0, size: tuple[int, int] = (96, 64)) -> bytes:
    """Return a JPEG with random content. size: width and height."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def answer(text: str = "yes", began: float = 0.0, camera: str = "gate", **other: Any) -> Answer:
    """Return an answer to a chunk of one second."""
    fields = {
        "ended": began + 0.9,
        "answered": began + 1.2,
        "scores": {},
        "yes": None,
        "objects": [],
        "adapter": "people",
        "digest": "ab12",
        "picture": b"",
        "clip": lambda begin, end: None,
    }
    return Answer(camera=camera, began=began, text=text, **{**fields, **other})


def view(name: str, **other: Any) -> CameraView:
    return {
        "name": name,
        "state": "running",
        "overloaded": False,
        "detail": "",
        "adapter": "people",
        "picture": b"",
        "answer": "",
        "answered": None,
        "lag": None,
        "chunks": 0,
        "drops": 0,
        "reconnections": 0,
        "gaps": 0,
        "errors": 0,
        "damaged": 0,
        "skipped": 0.0,
        **other,
    }


def free_port() -> int:
    """Return a port that nobody uses, and that no connection gets by chance."""
    return choose_ports({"port": 0}, "127.0.0.1")["port"]


class Hook:
    """A webhook. respond: returns the status for a body. bodies, headers: of all requests."""

    def __init__(self, respond: Callable[[bytes], int] = lambda body: 200, port: int = 0) -> None:
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                hook.headers.append({name.lower(): text for name, text in self.headers.items()})
                hook.bodies.append(body)
                self.send_response(respond(body))
                self.send_header("location", "/elsewhere")
                self.send_header("content-length", "0")
                self.end_headers()

            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def messages(self) -> list[Any]:
        return [json.loads(body) for body in self.bodies]

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def hook(respond: Callable[[bytes], int] = lambda body: 200, port: int = 0) -> Iterator[Hook]:
    running = Hook(respond, port)
    try:
        yield running
    finally:
        running.close()


class Broker:
    """A mosquitto broker on a port that it keeps. users: passwords by name; without any, all may
    connect."""

    def __init__(self, folder: Path, **users: str) -> None:
        self._program = shutil.which("mosquitto") or "/usr/sbin/mosquitto"
        if not Path(self._program).is_file():
            pytest.skip("mosquitto is not installed (apt install mosquitto)")
        pytest.importorskip("paho.mqtt", reason="paho-mqtt is not installed")
        self.port = free_port()
        lines = ["user root", f"listener {self.port} 127.0.0.1", "max_queued_messages 0"]
        # Sessions of subscribers outlast a restart.
        lines += ["persistence true", f"persistence_location {folder}/"]
        lines.append(f"allow_anonymous {'false' if users else 'true'}")
        if users:
            passwords = folder / "passwords"
            for name, password in users.items():
                command = ["mosquitto_passwd", "-b", *([] if passwords.exists() else ["-c"])]
                arguments = [*command, str(passwords), name, password]
                subprocess.run(arguments, check=True, capture_output=True)
            lines.append(f"password_file {passwords}")
        self._config = folder / "mosquitto.conf"
        self._config.write_text("\n".join(lines) + "\n")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            [self._program, "-c", str(self._config)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until(self._listens)

    def freeze(self, frozen: bool) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP if frozen else signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(60)
            self._process = None

    def _listens(self) -> bool:
        with closing(socket.socket()) as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


@contextmanager
def broker(folder: Path, **users: str) -> Iterator[Broker]:
    made = Broker(folder, **users)
    made.start()
    try:
        yield made
    finally:
        made.stop()


@contextmanager
def subscriber(port: int, topic: str = "#") -> Iterator[list[tuple[str, bytes]]]:
    """Yield the list of all messages, as topic and content, that arrive. The broker keeps those
    that are sent while it, or the subscriber, is away."""
    from paho.mqtt.client import Client
    from paho.mqtt.enums import CallbackAPIVersion

    messages: list[tuple[str, bytes]] = []
    ready = threading.Event()
    client = Client(CallbackAPIVersion.VERSION2, uuid.uuid4().hex, clean_session=False)
    client.on_message = lambda client, data, got: messages.append((got.topic, got.payload))
    client.on_subscribe = lambda *_: ready.set()
    client.on_connect = lambda client, *_: client.subscribe(topic, 1)
    client.reconnect_delay_set(1, 1)
    client.connect("127.0.0.1", port)
    client.loop_start()
    try:
        assert ready.wait(60)
        yield messages
    finally:
        client.disconnect()
        client.loop_stop()
