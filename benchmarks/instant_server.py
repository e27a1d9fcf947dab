"""A server that answers immediately, for measuring what a gateway or a proxy before it costs.

usage: python -m benchmarks.instant_server PORT
"""

from __future__ import annotations

import asyncio
import json
import struct
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from benchmarks.loads import OUTPUT
from vlora.net import LOOPBACK, load_grpc_stubs

service_pb2, service_pb2_grpc = load_grpc_stubs()

DESCRIPTION = {"max_model_len": 4096, "tasks": ["raw"], "adapters": []}


async def stream(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
    """Answer the requests of one stream.

    The answer to a question has `OUTPUT` tokens. The answer to a request with the input `describe`
    is a description of the server.
    """
    async for request in requests:
        if request.inputs[0].name == "describe":
            response = _response(request.id, True, details=_text(json.dumps(DESCRIPTION)))
            yield service_pb2.ModelStreamInferResponse(infer_response=response)
            continue
        for number in range(1, OUTPUT + 1):
            response = _token(request.id, number == OUTPUT)
            yield service_pb2.ModelStreamInferResponse(infer_response=response)


async def infer(request: Any, context: Any) -> Any:
    """Answer a unary call with one token."""
    return _token(request.id, True)


async def metadata(request: Any, context: Any) -> Any:
    """Describe the only inputs that a load must have."""
    described = service_pb2.ModelMetadataResponse(name=request.name)
    for name in ("text_input", "sampling_parameters", "image"):
        described.inputs.add(name=name, datatype="BYTES", shape=[-1])
    return described


def _token(id: str, is_last: bool) -> Any:
    reason, count = _text("length" if is_last else "None"), struct.pack("<I", 1)
    return _response(
        id, is_last, text_output=_text("x"), finish_reason=reason, num_output_tokens=count
    )


def _text(text: str) -> bytes:
    return struct.pack("<I", len(text)) + text.encode()


def _response(id: str, final: bool, **outputs: bytes) -> Any:
    response = service_pb2.ModelInferResponse(model_name="lmm", id=id)
    response.parameters["triton_final_response"].bool_param = final
    for name, raw in outputs.items():
        datatype = "UINT32" if name.startswith("num_") else "BYTES"
        response.outputs.add(name=name, datatype=datatype, shape=[1])
        response.raw_output_contents.append(raw)
    return response


async def main(port: int) -> None:
    """Serve until the process is ended."""
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    servicer = type("Servicer", (service_pb2_grpc.GRPCInferenceServiceServicer,), {})()
    servicer.ModelStreamInfer, servicer.ModelInfer = stream, infer
    servicer.ModelMetadata = metadata
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    server.add_insecure_port(f"{LOOPBACK}:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
