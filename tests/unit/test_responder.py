"""Tests of the conversion of errors to messages for clients, and back."""

from __future__ import annotations

import pytest

from vlora.errors import BY_CODE, Internal, NotFound, VLoraError, from_message
from vlora.serving.responder import as_vlora_error, to_message


@pytest.mark.parametrize("kind", BY_CODE.values())
def test_an_error_keeps_its_code_in_a_message(kind: type[VLoraError]) -> None:
    error = from_message(to_message(kind("what: is wrong")))
    assert (type(error), error.message) == (kind, "what: is wrong")
    assert type(from_message(f"in ensemble 'x', {to_message(kind('w'))}")) is kind


def test_a_message_without_a_code_is_an_internal_error() -> None:
    assert isinstance(from_message("Stub process is not healthy."), Internal)
    assert as_vlora_error(NotFound("x"), "asking").code == "NOT_FOUND"
    assert "KeyError" not in as_vlora_error(KeyError("x"), "asking").message
