"""Tests of structured answers of a real server, over gRPC and through the gateway."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
import regex

from tests.support.gateway import Gateway
from tests.support.grammars import HOSTILE
from tests.support.triton_client import Asker, Refused, picture

openai = pytest.importorskip("openai", reason="the package openai is not installed")

SCHEMA = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "green", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 9}, "maxItems": 2},
    },
    "required": ["color", "count", "tags"],
    "additionalProperties": False,
}
PATTERN = "(red|green) [0-9]{2}"


def ask_structured(ask: Asker, model: str = "lmm", **sampling: Any) -> str:
    (response,) = ask.stream(
        model,
        text_input="what is it?",
        sampling_parameters={"temperature": 1, "seed": 3} | sampling,
        exclude_input_in_output=True,
    )
    return str(response["text_output"])


def test_an_answer_follows_a_schema_an_expression_or_a_grammar(ask: Asker) -> None:
    answer = ask_structured(ask, structured_outputs={"json": SCHEMA})
    jsonschema.validate(json.loads(answer), SCHEMA)
    assert regex.fullmatch(PATTERN, ask_structured(ask, guided_regex=PATTERN))
    lark = 'start: "a" b+ "c"\nb: "b"'
    answer = ask_structured(ask, structured_outputs=json.dumps({"grammar": lark}))
    assert regex.fullmatch("ab+c", answer)
    assert ask_structured(ask, structured_outputs={"choice": ["x", "y"]}) in ("x", "y")


def test_the_ensembles_restrict_answers_about_images(ask: Asker) -> None:
    sampling = {"structured_outputs": {"regex": PATTERN}}
    responses = ask.stream(
        "visual_retrieval", text_input="what?", image=[picture()], sampling_parameters=sampling
    )
    assert regex.fullmatch(PATTERN, "".join(str(one["text_output"]) for one in responses))


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ({"json": {"type": "strin"}}, "INVALID_ARG: 'structured_outputs' is refused"),
        ({"regex": "("}, "INVALID_ARG: 'structured_outputs' is refused: .*invalid regex"),
        ({"json": {}, "regex": "a"}, "INVALID_ARG: .* exactly one of the keys"),
        ({"structural_tag": {}}, "UNSUPPORTED: .* not 'structural_tag'"),
    ],
)
def test_a_structure_that_cannot_be_served_is_refused(
    ask: Asker, structure: dict[str, Any], message: str
) -> None:
    with pytest.raises(Refused, match=message):
        ask_structured(ask, structured_outputs=structure)


def test_healthy_requests_finish_beside_hostile_structures(ask: Asker) -> None:
    names = ("cubed repeats", "a long literal", "terminals that double", "many properties")
    expected = ask_structured(ask, guided_regex=PATTERN)

    def attack(name: str) -> str:
        structure = HOSTILE[name]
        try:
            return ask_structured(
                ask, structured_outputs={structure.kind: structure.text}, max_tokens=5
            )
        except Refused as refused:
            return str(refused)

    with ThreadPoolExecutor(len(names)) as threads:
        attacks = [threads.submit(attack, name) for name in names]
        for _ in range(5):
            assert ask_structured(ask, guided_regex=PATTERN) == expected
        answers = [one.result() for one in attacks]
    assert not any("INTERNAL" in answer for answer in answers), answers


def test_the_official_client_gets_json_by_response_format(gateway: Gateway) -> None:
    client = gateway.client.chat.completions
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Describe the picture."}]
    wanted = {"type": "json_schema", "json_schema": {"name": "scene", "schema": SCHEMA}}
    for sampling in ({"temperature": 0}, {"temperature": 1.5, "seed": 4}):
        answer = client.create(
            model="base", messages=messages, response_format=wanted, max_tokens=300, **sampling
        )
        (choice,) = answer.choices
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
        chunks = list(
            client.create(
                model="base",
                messages=messages,
                response_format=wanted,
                max_tokens=300,
                stream=True,
                **sampling,
            )
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == choice.message.content or sampling["temperature"]


def test_the_official_client_gets_what_extra_fields_of_vllm_ask_for(gateway: Gateway) -> None:
    client = gateway.client.chat.completions
    for extra, pattern in (
        ({"structured_outputs": {"regex": PATTERN}}, PATTERN),
        ({"guided_regex": PATTERN}, PATTERN),
        ({"guided_grammar": 'start: "x" | "y" start'}, "y*x"),
        ({"guided_choice": ["one", "two"]}, "one|two"),
    ):
        answer = client.create(
            model="base",
            messages=[{"role": "user", "content": "Answer."}],
            max_tokens=300,
            extra_body=extra,
        )
        (choice,) = answer.choices
        matches = regex.fullmatch(pattern, choice.message.content, partial=True)
        assert matches, choice
        assert not matches.partial or choice.finish_reason == "length"


def test_the_official_client_gets_an_error_that_names_the_fault(gateway: Gateway) -> None:
    with pytest.raises(openai.BadRequestError, match="Invalid type: strin") as refused:
        gateway.client.chat.completions.create(
            model="base",
            messages=[{"role": "user", "content": "Answer."}],
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "strin"}},
            },
        )
    assert refused.value.code == "INVALID_ARG"
