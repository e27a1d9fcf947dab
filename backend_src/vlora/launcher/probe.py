"""Checks a running server by asking it for an answer of one token.

Triton reports itself as ready even after a model's process has ended, so only a request, which
passes through all model processes, detects this. A healthy server that starts, drains or has a long
queue does not answer; a file of the run, the error, or growing metrics show this. This module
imports neither torch nor numpy, because Kubernetes runs the probe every few seconds.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import grpc

from vlora.net import Tls, get, grpc_options, is_local, load_grpc_stubs, port_hint

service_pb2, service_pb2_grpc = load_grpc_stubs()
ENSEMBLE = "video_analytics"
QUESTION = b"ready?"
SAMPLING = b'{"max_tokens": 1}'
# Counters that grow while a server works.
PROGRESS = {
    "vlora:engine_steps_total": "forward passes",
    "vlora:encoder_images_total": "encoded images",
}

# Share of the deadline that is reserved for reading the metrics of a server that does not answer.
METRICS_SHARE = 0.25

# Parts of the errors of a healthy server that accepts no requests: ours (queue full or draining),
# and Triton's while it drains. gRPC uses the same status for a broken connection.
BUSY_MESSAGES = ("UNAVAILABLE: ", "stopped accepting")


class Health(IntEnum):
    """State of a server. The values are exit codes of `vlora probe`."""

    READY = 0  # The server answers requests.
    DEAD = 1  # No server, an ended model process, or no answer and no progress in time.
    ALIVE = 3  # It accepts no requests now: it starts, drains, or has a full queue.


@dataclass(frozen=True)
class Finding:
    """Result of a probe, its reason for the user, and the seconds that it took."""

    health: Health
    reason: str
    seconds: float


def _channel(address: str, tls: Tls | None) -> grpc.Channel:
    options = grpc_options(address, tls)
    if tls is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, tls.credentials(), options)


def probe(
    address: str,
    deadline: float = 5.0,
    tls: Tls | None = None,
    metrics_port: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Finding:
    """Return the health of the gRPC server at `address` (host:port), within `deadline` seconds.

    metrics_port: port of the metrics on the same host. Without it, a server that does not answer in
        time counts as dead, even if it is working on a long queue.

    Raises OSError for TLS files that cannot be read. Faults of the server are never raised.
    """
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
            if is_local(host) and port.isdecimal() and _is_starting(int(port)):
                return finding(Health.ALIVE, "the server is starting; it is loading its models")
            hint = port_hint(error.details() or "")
            return finding(Health.DEAD, f"no server answers at {address}: {_describe(error)}{hint}")
        if not (live and ready):
            return finding(Health.ALIVE, "the server is running; its models are not ready yet")
        before = {} if metrics_port is None else _read_progress(host, metrics_port, left())
        try:
            share = 1.0 if metrics_port is None else 1.0 - METRICS_SHARE
            stub.ModelInfer(_request(), timeout=left() * share)
        except grpc.RpcError as error:
            late = error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            if late and metrics_port is not None:
                work = _work_done(before, _read_progress(host, metrics_port, left()))
                if work:
                    reason = f"no answer yet, but {work}: the server is working"
                    return finding(Health.ALIVE, reason)
            return finding(*_judge(error, deadline))
    return finding(Health.READY, f"{ENSEMBLE} answered")


def _judge(error: grpc.RpcError, deadline: float) -> tuple[Health, str]:
    code = error.code()
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return Health.DEAD, f"{ENSEMBLE} did not answer within {deadline:g} s"
    if any(message in (error.details() or "") for message in BUSY_MESSAGES):
        return Health.ALIVE, f"the server accepts no requests now: {_describe(error)}"
    if code == grpc.StatusCode.NOT_FOUND:
        return Health.DEAD, f"the server does not serve {ENSEMBLE}: {_describe(error)}"
    return Health.DEAD, f"{ENSEMBLE} failed: {_describe(error)}"


def _is_starting(port: int) -> bool:
    # Imported only when needed, because importing psutil takes a tenth of the time of a probe.
    from vlora.launcher.run_folder import is_starting

    return is_starting(port)


def _read_progress(host: str, port: int, seconds: float) -> dict[str, float]:
    try:
        page = get(f"http://{host}:{port}/metrics", seconds, direct=is_local(host))
        counts: dict[str, float] = {}
        for line in page.decode().splitlines():
            name = line.partition("{")[0]
            if name in PROGRESS:
                counts[name] = counts.get(name, 0.0) + float(line.rpartition(" ")[2])
    except (OSError, ValueError):
        return {}
    return counts


def _work_done(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    grown = {name: count - before.get(name, count) for name, count in after.items()}
    return ", ".join(f"{count:.0f} {PROGRESS[name]}" for name, count in grown.items() if count > 0)


def _request() -> Any:
    name = f"vlora-probe-{uuid.uuid4().hex}"
    request = service_pb2.ModelInferRequest(model_name=ENSEMBLE, id=name)
    for name, value in (("text_input", QUESTION), ("sampling_parameters", SAMPLING)):
        tensor = request.inputs.add(name=name, datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(value)
    request.outputs.add(name="result")
    return request


def _describe(error: grpc.RpcError) -> str:
    first_line = (error.details() or "no details").partition("\n")[0]
    return f"{error.code().name}: {first_line}"
