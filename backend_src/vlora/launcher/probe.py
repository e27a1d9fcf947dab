"""Asks a running server for one tiny answer: the only way to tell a dead model from a live one.

Triton goes on calling itself live and ready when a model's process has died. A question without
an image through `video_analytics` passes all four processes (the encoder with zero rows), and its
answer is one token. Two things such a question cannot tell: a server that starts has no port open
yet, so on its own machine `vlora serve`'s mark is looked for; and one with a long queue answers as
late as a hung one, so that forward passes, in its metrics, are what tells them apart.

Light on purpose, since Kubernetes runs it every few seconds: no torch, no tritonclient helpers, and
every call has a deadline.
"""

from __future__ import annotations

import time
import urllib.request
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from vlora.launcher.run_folder import is_starting

ENSEMBLE = "video_analytics"
QUESTION = b"ready?"
SAMPLING = b'{"max_tokens": 1}'
STEPS = "vlora:engine_steps_total"
HERE = ("localhost", "127.0.0.1", "[::1]")
FOR_METRICS = 0.25
"""Share of the deadline that is kept for a look at the metrics after a question without answer."""

WELL_BUT_BUSY = ("UNAVAILABLE: ", "stopped accepting")
"""Parts of what a server says that is well but takes nothing more: ours (queue full, draining) and
Triton's own while it drains. gRPC uses the same status for a connection that broke."""


class Health(IntEnum):
    """What `vlora probe` exits with."""

    READY = 0
    """It answers questions."""
    DEAD = 1
    """Nobody listens, a model's process is gone, or no answer came within the deadline and no
    forward pass was seen in it."""
    ALIVE = 3
    """It lives but takes no questions now: starting, draining, or its queue is full."""


@dataclass(frozen=True)
class Finding:
    """The verdict, what it rests on, and the seconds it took."""

    health: Health
    reason: str
    seconds: float


@dataclass(frozen=True)
class Tls:
    """How to reach a server with TLS: PEM files; `name` is the one in its certificate, where that
    is not the host that is asked. key and certificate are ours, for mutual TLS."""

    ca: Path
    name: str | None = None
    key: Path | None = None
    certificate: Path | None = None


def _channel(address: str, tls: Tls | None) -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(address)
    credentials = grpc.ssl_channel_credentials(
        tls.ca.read_bytes(),
        None if tls.key is None else tls.key.read_bytes(),
        None if tls.certificate is None else tls.certificate.read_bytes(),
    )
    named = () if tls.name is None else (("grpc.ssl_target_name_override", tls.name),)
    return grpc.secure_channel(address, credentials, named)


def probe(
    address: str,
    deadline: float = 5.0,
    tls: Tls | None = None,
    metrics_port: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Finding:
    """Looks at the gRPC server at `address` (host:port); never takes longer than `deadline`
    seconds. metrics_port: on the same host; without one, a question that is not answered in time
    means a hung server, however long its queue. Raises nothing for a server's faults, OSError for
    TLS files that cannot be read."""
    started = clock()

    def left() -> float:
        return max(deadline - (clock() - started), 0.001)

    def finding(health: Health, reason: str) -> Finding:
        return Finding(health, reason, clock() - started)

    host, _, port = address.rpartition(":")
    with _channel(address, tls) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            live = stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=left()).live
            ready = stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=left()).ready
        except grpc.RpcError as error:
            if host in HERE and port.isdecimal() and is_starting(int(port)):
                return finding(Health.ALIVE, "the server is starting; its models are being loaded")
            return finding(Health.DEAD, f"nobody answers at {address}: {_told(error)}")
        if not (live and ready):
            return finding(Health.ALIVE, "the server is up; its models are not ready yet")
        steps = None if metrics_port is None else _steps(host, metrics_port, left())
        try:
            share = 1.0 if metrics_port is None else 1.0 - FOR_METRICS
            stub.ModelInfer(_question(), timeout=left() * share)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED and metrics_port is not None:
                now = _steps(host, metrics_port, left())
                if steps is not None and now is not None and now > steps:
                    busy = f"no answer yet, but {now - steps:.0f} forward passes: a long queue"
                    return finding(Health.ALIVE, busy)
            return finding(*_verdict(error, deadline))
    return finding(Health.READY, f"{ENSEMBLE} answered")


def _verdict(error: grpc.RpcError, deadline: float) -> tuple[Health, str]:
    code = error.code()
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return Health.DEAD, f"{ENSEMBLE} gave no answer within {deadline:g} s"
    if any(words in (error.details() or "") for words in WELL_BUT_BUSY):
        return Health.ALIVE, f"it takes no question now: {_told(error)}"
    if code == grpc.StatusCode.NOT_FOUND:
        return Health.DEAD, f"{ENSEMBLE} is not served there: {_told(error)}"
    return Health.DEAD, f"{ENSEMBLE} failed: {_told(error)}"


def _steps(host: str, port: int, seconds: float) -> float | None:
    """Forward passes so far, from the server's metrics; None where they cannot be had."""
    try:
        with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=seconds) as answer:
            lines = answer.read().decode().splitlines()
    except (OSError, ValueError):
        return None
    counts = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(STEPS)]
    return sum(counts) if counts else None


def _question() -> Any:
    request = service_pb2.ModelInferRequest(
        model_name=ENSEMBLE, id=f"vlora-probe-{uuid.uuid4().hex}"
    )
    for name, value in (("text_input", QUESTION), ("sampling_parameters", SAMPLING)):
        tensor = request.inputs.add(name=name, datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(value)
    request.outputs.add(name="result")
    return request


def _told(error: grpc.RpcError) -> str:
    first_line = (error.details() or "no details").partition("\n")[0]
    return f"{error.code().name}: {first_line}"
