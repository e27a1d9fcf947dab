"""A running `vlora gateway` with its clients."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.support.polling import until

KEY = "a-key-of-the-tests"


class Gateway:
    """A running `vlora gateway`. log: file of its output."""

    def __init__(self, process: subprocess.Popen[bytes], address: str, log: Path) -> None:
        self.process = process
        self.address = address
        self.log = log
        self.killed = False

    @cached_property
    def client(self) -> Any:
        import openai

        return openai.OpenAI(
            base_url=f"http://{self.address}/v1", api_key=KEY, max_retries=0, timeout=60
        )

    def kill(self) -> None:
        self.killed = True
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if "client" in vars(self):
            self.client.close()

    def http(
        self, path: str, body: bytes | None = None, headers: Mapping[str, str] = {}
    ) -> tuple[int, str]:
        request = urllib.request.Request(
            f"http://{self.address}{path}",
            data=body,
            headers={"content-type": "application/json", **headers},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def running(self) -> float:
        """Return the number of requests that the gateway answers now, without this one."""
        page = self.http("/metrics")[1].splitlines()
        (line,) = [line for line in page if line.startswith("vlora_gateway_requests_running ")]
        return float(line.split()[1]) - 1


@contextmanager
def running(grpc: str, folder: Path, *options: str, port: int = 0) -> Iterator[Gateway]:
    """Run `vlora gateway` in front of a server, and stop it by SIGTERM unless it was killed."""
    log = folder / "gateway.log"
    command = [sys.executable, "-m", "vlora.cli", "gateway", "--port", str(port), "--grpc", grpc]
    with log.open("wb") as file:
        process = subprocess.Popen([*command, *options], stdout=file, stderr=file)
    try:
        until(lambda: "gateway   http://" in log.read_text() or process.poll() is not None)
        address = log.read_text().partition("http://")[2].partition("/v1")[0]
        assert process.poll() is None, log.read_text()
        gateway = Gateway(process, address, log)
        with closing(gateway):
            yield gateway
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0 or gateway.killed
        assert "Traceback" not in log.read_text()
    finally:
        process.kill()
        process.wait()
