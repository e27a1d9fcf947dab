"""Test that an endpoint picker of Kubernetes' Gateway API finds the server that has an adapter.

The picker is that of llm-d in short: it reads `vllm:lora_requests_info` of each server. Envoy asks
it by the protocol of the API (ext_proc), and sends the request to the address that it names.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
import tritonclient.grpc as grpcclient
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from clients.common import first_string, routing_headers, stream_responses
from tests.support import deploy_kit as kit
from tests.support.polling import until
from tests.support.triton_client import serving, to_inputs
from vlora.launcher.repository import ServerOptions
from vlora.launcher.server import TritonServer
from vlora.net import LOOPBACK, get

DESTINATION = "x-gateway-destination-endpoint"
NAMES = ("all-r8", "attention-r4")
INFO = re.compile(r'^vllm:lora_requests_info\{.*running_lora_adapters="([^"]*)"', re.MULTILINE)
# The part of envoy.service.ext_proc.v3 that is needed: message, field, number, type; * is repeated.
MESSAGES = """
    HeaderValue key 1 string; HeaderValue value 2 string; HeaderValue raw_value 3 bytes
    HeaderMap headers 1 *HeaderValue; HttpHeaders headers 1 HeaderMap
    ProcessingRequest request_headers 2 HttpHeaders
    HeaderValueOption header 1 HeaderValue; HeaderMutation set_headers 1 *HeaderValueOption
    CommonResponse header_mutation 2 HeaderMutation; HeadersResponse response 1 CommonResponse
    ProcessingResponse request_headers 1 HeadersResponse
"""


def messages() -> dict[str, Any]:
    """Return the classes of MESSAGES by name."""
    file = descriptor_pb2.FileDescriptorProto(name="picker.proto", package="picker")
    made: dict[str, Any] = {}
    for line in MESSAGES.replace("\n", ";").split(";"):
        if not line.strip():
            continue
        message, name, number, kind = line.split()
        if message not in made:
            made[message] = file.message_type.add(name=message)
        label = 3 if kind.startswith("*") else 1
        field = made[message].field.add(name=name, number=int(number), label=label)
        scalars = {"string": field.TYPE_STRING, "bytes": field.TYPE_BYTES}
        field.type = scalars.get(kind, field.TYPE_MESSAGE)
        if kind not in scalars:
            field.type_name = f".picker.{kind.lstrip('*')}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = {name: pool.FindMessageTypeByName(f"picker.{name}") for name in made}
    return {name: message_factory.GetMessageClass(one) for name, one in found.items()}


class Picker:
    """Names the server that has a request's adapter, or else the one with the fewest adapters.

    servers: URL of the metrics by gRPC address.
    """

    def __init__(self, servers: Mapping[str, str], port: int) -> None:
        self._servers = servers
        self._kinds = messages()
        handler = grpc.stream_stream_rpc_method_handler(
            self._process,
            request_deserializer=self._kinds["ProcessingRequest"].FromString,
            response_serializer=self._kinds["ProcessingResponse"].SerializeToString,
        )
        service = "envoy.service.ext_proc.v3.ExternalProcessor"
        self._server = grpc.server(ThreadPoolExecutor(16))
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(service, {"Process": handler})]
        )
        self._server.add_insecure_port(f"{LOOPBACK}:{port}")
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0).wait()

    def _process(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        for request in requests:
            headers = {one.key: one.raw_value for one in request.request_headers.headers.headers}
            answer = self._kinds["ProcessingResponse"]()
            mutation = answer.request_headers.response.header_mutation
            header = mutation.set_headers.add().header
            header.key = DESTINATION
            header.raw_value = self._pick(headers.get("x-lora-adapter", b"").decode()).encode()
            yield answer

    def _pick(self, adapter: str) -> str:
        loaded = {address: loaded_adapters(url) for address, url in self._servers.items()}
        return min(loaded, key=lambda one: (adapter not in loaded[one], len(loaded[one])))


def loaded_adapters(url: str) -> list[str]:
    found = INFO.search(get(url, 5, direct=True).decode())
    return found[1].split(",") if found and found[1] else []


def envoy_configuration(port: int, picker: int) -> str:
    http2 = {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": {}},
        }
    }
    filters = "type.googleapis.com/envoy.extensions.filters"
    picking = {
        "@type": f"{filters}.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
        "processing_mode": {"request_header_mode": "SEND", "response_header_mode": "SKIP"},
        "message_timeout": "5s",
    }
    route = {"match": {"prefix": "/"}, "route": {"cluster": "picked", "timeout": "0s"}}
    manager = {
        "@type": f"{filters}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "picked",
        "http_filters": [
            {"name": "envoy.filters.http.ext_proc", "typed_config": picking},
            {"name": "router", "typed_config": {"@type": f"{filters}.http.router.v3.Router"}},
        ],
        "route_config": {"virtual_hosts": [{"name": "a", "domains": ["*"], "routes": [route]}]},
    }
    chain = {"filters": [{"name": "http", "typed_config": manager}]}
    endpoint = {"endpoint": {"address": address_of(picker)}}
    clusters = [
        {
            "name": "picked",
            "type": "ORIGINAL_DST",
            "lb_policy": "CLUSTER_PROVIDED",
            "original_dst_lb_config": {"use_http_header": True, "http_header_name": DESTINATION},
            "typed_extension_protocol_options": http2,
        },
        {
            "name": "picker",
            "type": "STATIC",
            "typed_extension_protocol_options": http2,
            "load_assignment": {
                "cluster_name": "picker",
                "endpoints": [{"lb_endpoints": [endpoint]}],
            },
        },
    ]
    listeners = [{"name": "all", "address": address_of(port), "filter_chains": [chain]}]
    return json.dumps({"static_resources": {"listeners": listeners, "clusters": clusters}})


def address_of(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": LOOPBACK, "port_value": port}}


@pytest.fixture
def servers(checkpoint: Path, adapters_dir: Path, tmp_path: Path) -> Iterator[list[TritonServer]]:
    """Yield a server for each of NAMES, which has only this adapter."""
    with ExitStack() as stack:
        started = []
        for name in NAMES:
            shutil.copytree(adapters_dir / name, tmp_path / f"only-{name}" / name)
            paths = {"model": str(checkpoint), "adapters": str(tmp_path / f"only-{name}")}
            options = ServerOptions(model_json=paths, log=tmp_path / f"{name}.log")
            started.append(stack.enter_context(serving(options)))
        yield started


def ask(url: str, adapter: str) -> None:
    sampling = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "lora_name": adapter}
    inputs = to_inputs({"text_input": "hello", "sampling_parameters": sampling})
    headers = routing_headers(adapter)
    with grpcclient.InferenceServerClient(url) as client:
        pieces = stream_responses(client, "lmm", inputs, headers=headers)
        assert "".join(first_string(one, "text_output") for one in pieces)


def test_requests_go_where_the_picker_finds_their_adapter(
    tools: Path, servers: list[TritonServer], tmp_path: Path
) -> None:
    ports = kit.free_ports("envoy", "picker")
    picker = Picker({one.grpc_url: one.metrics_url for one in servers}, ports["picker"])
    (tmp_path / "envoy.json").write_text(envoy_configuration(ports["envoy"], ports["picker"]))
    command = [tools / "envoy", "-c", tmp_path / "envoy.json", "--disable-hot-restart"]
    url = f"{LOOPBACK}:{ports['envoy']}"
    with kit.running(command, tmp_path / "envoy.log"):
        try:
            for server, name in zip(servers, NAMES, strict=True):
                until(lambda at=server, name=name: loaded_adapters(at.metrics_url) == [name])
            with grpcclient.InferenceServerClient(url) as client:
                until(lambda: is_live(client))
            # The other server would refuse the adapter.
            for name in (*NAMES, *reversed(NAMES)) * 3:
                ask(url, name)
        finally:
            picker.stop()


def is_live(client: Any) -> bool:
    try:
        return bool(client.is_server_live())
    except grpcclient.InferenceServerException:
        return False
