"""Tests of protocols and networks that a server closes to clients by default."""

from __future__ import annotations

import json
import re
import socket
import urllib.error
import urllib.request
from typing import Any

import grpc
import psutil
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support.triton_client import Asker, picture
from vlora.launcher.server import TritonServer
from vlora.server_run import SHARED_MEMORY as REGIONS

SHARED_MEMORY = {"key": "/vlora", "offset": 0, "byte_size": 8}
HTTP_CALLS = [
    "/v2/repository/index",
    "/v2/repository/models/lmm/load",
    "/v2/repository/models/lmm/unload",
    "/v2/repository/models/..%2f..%2ftmp/load",
    "/v2/trace/setting",
    "/v2/models/lmm/trace/setting",
    "/v2/logging",
    *(
        f"/v2/{kind}sharedmemory/{call}"
        for kind in ("system", "cuda")
        for call in ("status", "region/x/status", "region/x/register", "unregister")
    ),
]
FILE = {"log_file": "/tmp/vlora-client", "trace_file": "/tmp/vlora-client"}
GRPC_CALLS = [
    "RepositoryIndex",
    "RepositoryModelLoad",
    "RepositoryModelUnload",
    "TraceSetting",
    "LogSettings",
    *(
        f"{kind}SharedMemory{call}"
        for kind in ("System", "Cuda")
        for call in ("Status", "Register", "Unregister")
    ),
]


def http(ask: Asker, path: str, body: Any = None) -> tuple[int, str]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{ask.http_url}{path}", data=data)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.parametrize("path", HTTP_CALLS)
def test_closed_protocols_are_refused_over_http(ask: Asker, path: str) -> None:
    for body in (None, {}, FILE | SHARED_MEMORY):
        status, text = http(ask, path, body)
        # Triton refuses a wrong method before it looks at restrictions.
        assert (status, "restricted" in text) in ((403, True), (405, False)), (body, text)
    assert status == 403


@pytest.mark.parametrize("call", GRPC_CALLS)
def test_closed_protocols_are_refused_over_grpc(ask: Asker, call: str) -> None:
    with grpc.insecure_channel(ask.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for metadata in ((), (("triton-grpc-protocol-vlora-closed", "closed"),)):
            request = getattr(service_pb2, f"{call}Request")()
            with pytest.raises(grpc.RpcError, match="protocol is restricted"):
                getattr(stub, call)(request, timeout=60, metadata=metadata)


def test_clients_need_no_key_for_health_metadata_statistics_and_requests(ask: Asker) -> None:
    paths = ["health/live", "health/ready", "", "models/lmm", "models/lmm/ready"]
    for path in [*paths, "models/lmm/config", "models/lmm/stats", "models/stats"]:
        assert http(ask, f"/v2/{path}".rstrip("/"))[0] == 200, path
    question = {"text_input": "What?"}
    assert http(ask, "/v2/models/video_analytics/generate", question)[0] == 200
    client = ask.client
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("lmm")
    assert client.get_server_metadata().extensions
    assert client.get_model_metadata("lmm").inputs
    assert client.get_model_config("lmm").config.input
    assert client.get_inference_statistics("lmm").model_stats
    assert ask.once("video_analytics", image=picture(), **question)["result"]


def test_the_key_of_a_closed_protocol_is_random_and_not_in_the_log(server: TritonServer) -> None:
    command = " ".join(psutil.Process(server.pid).cmdline())
    keys = re.findall(r"vlora-closed=([0-9a-f]{64})(?: |$)", command)
    assert len(set(keys)) == 2
    log = server.log.read_text(errors="replace")
    assert not [key for key in keys if key in log]


def test_no_other_user_can_read_the_models_shared_memory(server: TritonServer) -> None:
    names = [psutil.Process(pid).cmdline()[2] for pid in server.models.values()]
    assert len(names) == 4
    assert {oct((REGIONS / name).stat().st_mode & 0o777) for name in names} == {"0o600"}


def test_a_server_listens_on_this_machine_only(server: TritonServer) -> None:
    options = server.options
    for port in (options.http_port, options.grpc_port, options.metrics_port):
        socket.create_connection(("127.0.0.1", port), timeout=30).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=30)
