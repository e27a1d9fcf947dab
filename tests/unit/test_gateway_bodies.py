"""Tests of receiving and parsing the bodies of requests."""

from __future__ import annotations

import asyncio
import threading

import pytest

pytest.importorskip("fastapi", reason="the extra `gateway` is not installed")

from fastapi import Request

from vlora.gateway.bodies import MANY_COMMAS, Bodies
from vlora.gateway.errors import ApiError
from vlora.gateway.messages import Conversation, Media
from vlora.gateway.options import GatewayOptions


def test_a_body_with_many_values_is_parsed_beside_the_event_loop() -> None:
    """Other requests are served meanwhile: parsing ends only after the loop has run a callback."""
    went_on = threading.Event()

    async def parsed() -> tuple[str, str]:
        bodies = Bodies(GatewayOptions())
        asyncio.get_running_loop().call_soon(went_on.set)
        large = await bodies.parse(bytearray(b"," * (MANY_COMMAS + 1)), name_of_thread)
        small = await bodies.parse(bytearray(b"x" * (MANY_COMMAS + 1)), name_of_thread)
        bodies.close()
        return large, small

    def name_of_thread(body: bytearray) -> str:
        assert went_on.wait(60)
        return threading.current_thread().name

    large, small = asyncio.run(parsed())
    assert large.startswith("parser")
    assert small == threading.current_thread().name


def test_an_encoded_body_is_refused_by_the_name_of_its_encoding() -> None:
    headers = [(b"content-type", b"application/json"), (b"content-encoding", b"gzip")]

    async def receive() -> None:
        await Bodies(GatewayOptions()).receive(Request({"type": "http", "headers": headers}), print)

    with pytest.raises(ApiError, match="content encoding must be identity, not 'gzip'"):
        asyncio.run(receive())


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ("image 1 is empty", "second"),
        ("frame 0 is corrupt", "clip"),
        ("image 2 is empty", None),
        ("the image 1 is empty", None),
        ("image 1x is empty", None),
    ],
)
def test_an_error_about_an_image_names_its_part_of_the_request(
    message: str, place: str | None
) -> None:
    images = Media("data:", "first"), Media("data:", "second")
    assert Conversation("", images, (Media("data:", "clip"),)).place_of(message) == place
