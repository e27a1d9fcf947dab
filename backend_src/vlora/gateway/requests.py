"""Reading of request bodies: OpenAI's fields, vLLM's additional ones, and those of this server.

**Invariant:** a field that would change the answer is passed on or rejected by name, never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vlora.errors import InvalidArgument, nearest, shown
from vlora.gateway.errors import ApiError, invalid, unsupported, wrong_value
from vlora.gateway.messages import MAX_HINT_LENGTH, Conversation, check_keys, read_messages
from vlora.sampling import KNOWN_KEYS, REFUSED
from vlora.strict_json import Range, is_text, load_object
from vlora.structured.structure import KINDS, MAX_DEPTH, STRUCTURE_KEYS
from vlora.tasks import RAW_TASK

# Maximum number of commas in a body. It limits the number of values, which take time to check.
MAX_COMMAS = 1 << 18
MAX_NAME_LENGTH = 256  # Maximum number of characters of the name of a model or task.
MAX_TOP_LOGPROBS = 20

# Sampling keys that are sent if the request lacks them. `stream_interval_ms` limits the cost of
# fast models: sending one token alone takes as much time in the gateway and in the server as
# sending ten tokens together.
DEFAULTS: Mapping[str, Any] = {"temperature": 0, "stream_interval_ms": 20}

# Priorities at a gateway with several tenants, none of whom may go before the others.
TENANTS_PRIORITY = Range(
    0, 2**31 - 1, "a whole number from 0 to 2147483647, because others use this gateway", whole=True
)

# Fields that are accepted with any value, because they never change an answer here.
NO_EFFECT = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "rid",
        "safety_identifier",
        "user",
    }
)

# Fields of unsupported features, each with the values that do not request the feature. Each of
# these fields may also be null.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    # Fields of vLLM and SGLang.
    "add_special_tokens": (False,),
    "bootstrap_host": (),
    "cache_salt": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "data_parallel_rank": (),
    "documents": ([],),
    "ebnf": (),
    "include_reasoning": (True, False),
    "kv_transfer_params": (),
    "lora_path": (),
    "no_stop_trim": (False,),
    "regex": (),
    "return_hidden_states": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "separate_reasoning": (True, False),
    "session_params": (),
    "stop_regex": ([],),
    "stream_reasoning": (True, False),
    "vllm_xargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default", "flex", "priority", "scale"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}

# Fields of vLLM that say how the prompt of a chat ends.
CHAT_OPTIONS = ("add_generation_prompt", "continue_final_message")
OWN = frozenset({"task"})  # Fields of this server that are not sampling keys.

# Types of `response_format`, each with its further keys.
RESPONSE_FORMATS = {"text": (), "json_object": ("schema",), "json_schema": ("json_schema",)}
JSON_SCHEMA_KEYS = ("name", "description", "schema", "strict")

# Key of `structured_outputs` by vLLM's older name for it.
STRUCTURED = {name: kind for name, kind in STRUCTURE_KEYS.items() if kind is not None}

COMMON = frozenset(
    {"model", "stream", "stream_options", "max_tokens", "response_format", "structured_outputs"}
)
CHAT = COMMON | {"messages", *CHAT_OPTIONS, "max_completion_tokens", "logprobs", "top_logprobs"}
COMPLETION = COMMON | {"prompt", "logprobs"}

# Sampling keys that are passed on to the server, which reads them or refuses them by name.
PASSED = frozenset({*KNOWN_KEYS, *REFUSED}) - {"lora_name", "max_tokens", "logprobs", *STRUCTURED}


@dataclass(frozen=True)
class Ask:
    """Content and options of a request.

    conversation: text, images and clips. Their URLs are not fetched yet.
    task: the task that the request names, if any.
    sampling: the server's `sampling_parameters`, without the adapter.
    include_usage: whether a stream ends with the numbers of tokens.
    top_logprobs: number of alternatives to list for each token; None without log probabilities.
    """

    chat: bool
    model: str
    conversation: Conversation
    task: str | None
    sampling: dict[str, Any] = field(default_factory=dict)
    stream: bool = False
    include_usage: bool = False
    top_logprobs: int | None = None

    @property
    def has_messages(self) -> bool:
        """Whether the conversation's text is JSON of messages."""
        return self.chat and self.task != RAW_TASK

    @property
    def logprobs(self) -> bool:
        return self.top_logprobs is not None


def read_body(body: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON object of a body. Raises ApiError."""
    if len(body) > MAX_COMMAS and (commas := body.count(b",")) > MAX_COMMAS:
        raise ApiError("TOO_LARGE", f"the body has {commas} commas; the limit is {MAX_COMMAS}")
    try:
        return load_object(body.decode(), "the body", MAX_DEPTH)
    except UnicodeDecodeError as error:
        raise invalid(None, f"the body is not valid UTF-8 at byte {error.start}") from None
    except InvalidArgument as error:
        raise invalid(None, error.message) from None


def read_chat(body: Mapping[str, Any]) -> Ask:
    """Return the request in a body of `/v1/chat/completions`. Raises ApiError."""
    given = _checked(body, CHAT, "chat completions")
    task = _text(given, "task")
    options = {name: _boolean(given, name) for name in CHAT_OPTIONS if name in given}
    conversation = read_messages(given.get("messages"), task, options)
    sampling = _sampling(given)
    sampling["max_tokens"] = _max_tokens(given)
    model, stream, usage = _model(given), _boolean(given, "stream"), _include_usage(given)
    logprobs = _chat_logprobs(given, sampling)
    return Ask(True, model, conversation, task, sampling, stream, usage, logprobs)


def read_completion(body: Mapping[str, Any]) -> Ask:
    """Return the request in a body of `/v1/completions`. Raises ApiError."""
    given = _checked(body, COMPLETION, "completions")
    prompt = given.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        (prompt,) = prompt
    if not is_text(prompt):
        remedy = "send several prompts, or token ids, as several requests"
        raise invalid("prompt", f"'prompt' must be one string; {remedy}")
    sampling = _sampling(given)
    if "max_tokens" in given:
        sampling["max_tokens"] = given["max_tokens"]
    logprobs = given.get("logprobs")
    if logprobs is not None:
        sampling["logprobs"] = _alternatives("logprobs", logprobs)
    model, task, conversation = _model(given), _text(given, "task"), Conversation(str(prompt))
    stream, usage = _boolean(given, "stream"), _include_usage(given)
    return Ask(False, model, conversation, task, sampling, stream, usage, logprobs)


def of_tenant(sampling: Mapping[str, Any], tenant: str) -> dict[str, Any]:
    """Return the sampling parameters as those of one of several tenants. Raises ApiError."""
    try:
        TENANTS_PRIORITY("priority", sampling.get("priority", 0))
    except InvalidArgument as error:
        raise invalid("priority", error.message) from None
    return {**sampling, "cache_salt": tenant}


def _checked(body: Mapping[str, Any], known: frozenset[str], what: str) -> dict[str, Any]:
    given = {}
    for name, value in body.items():
        if name == "lora_name":
            raise invalid(name, "'lora_name' is not used here: give the adapter's name as 'model'")
        if name in NO_EFFECT:
            continue
        if name in NEUTRAL:
            if value is not None and value not in NEUTRAL[name]:
                message = f"'{name}' = {shown(value)} is not supported; leave '{name}' out"
                raise unsupported(name, message)
            continue
        if name not in known | OWN | PASSED | STRUCTURE_KEYS.keys():
            hint = nearest(name, known | PASSED) if len(name) <= MAX_HINT_LENGTH else ""
            raise invalid(name[:MAX_HINT_LENGTH], f"unknown field {shown(name)} of {what}{hint}")
        if value is not None:
            given[name] = value
    return given


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    passed = {key: given[key] for key in given if key in PASSED and key not in STRUCTURE_KEYS}
    sampling = {**DEFAULTS, **passed}
    if (structure := _structure(given)) is not None:
        sampling["structured_outputs"] = json.dumps(structure)
    return sampling


def _structure(given: Mapping[str, Any]) -> dict[str, Any] | None:
    found: list[tuple[str, dict[str, Any]]] = []
    if (wanted := _response_format(given.get("response_format"))) is not None:
        found.append(("response_format", wanted))
    for name in ("structured_outputs", "guided_decoding"):
        if name in given:
            found.append((name, _structured_outputs(name, given[name])))
    found += [(name, {key: given[name]}) for name, key in STRUCTURED.items() if name in given]
    if len(found) > 1:
        names = " and ".join(f"'{name}'" for name, _ in found)
        raise invalid(found[1][0], f"{names} both restrict the answer; give one of them")
    return found[0][1] if found else None


def _response_format(value: Any) -> dict[str, Any] | None:
    param = "response_format"
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(value, dict) and isinstance(kind, str) and kind in RESPONSE_FORMATS:
        check_keys(value, ("type", *RESPONSE_FORMATS[kind]), param, f"'{param}'")
    if value is None or kind == "text":
        return None
    if kind == "json_object":
        # vLLM and SGLang restrict the answer to the schema, if there is one.
        schema = value.get("schema")
        return {"json_object": True} if schema is None else {"json": schema}
    if kind == "json_schema":
        schema = value.get("json_schema")
        if isinstance(schema, dict):
            check_keys(schema, JSON_SCHEMA_KEYS, f"{param}.json_schema", "'json_schema'")
        inner = schema.get("schema") if isinstance(schema, dict) else None
        if not isinstance(inner, dict | bool):
            raise invalid(param, "'response_format' needs the schema in 'json_schema.schema'")
        return {"json": inner}
    expected = "an object whose 'type' is 'text', 'json_object' or 'json_schema'"
    raise wrong_value(param, value, expected)


def _structured_outputs(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = load_object(value, f"'{name}'", MAX_DEPTH)
        except InvalidArgument as error:
            raise invalid(name, error.message) from None
    kinds = ", ".join(KINDS)
    if not isinstance(value, dict):
        raise invalid(name, f"'{name}' must be an object with one of the keys {kinds}")
    given = {key: inner for key, inner in value.items() if inner not in (None, False)}
    for key in given:
        if key not in KINDS:
            raise unsupported(name, f"'{name}' supports {kinds}, not {shown(key)}")
    if len(given) != 1:
        raise invalid(name, f"'{name}' must have exactly one of the keys {kinds}")
    return given


def _model(given: Mapping[str, Any]) -> str:
    name = _text(given, "model")
    if not name:
        raise invalid("model", "'model' is missing; GET /v1/models lists the names")
    return name


def _max_tokens(given: Mapping[str, Any]) -> Any:
    newer, older = given.get("max_completion_tokens"), given.get("max_tokens")
    if newer is not None and older is not None and newer != older:
        both = f"'max_tokens' = {shown(older)} and 'max_completion_tokens' = {shown(newer)}"
        raise invalid("max_completion_tokens", f"{both} differ; give one of them")
    return older if newer is None else newer


def _chat_logprobs(given: Mapping[str, Any], sampling: dict[str, Any]) -> int | None:
    if not _boolean(given, "logprobs"):
        if given.get("top_logprobs"):
            raise invalid("top_logprobs", "'top_logprobs' needs 'logprobs' = true")
        return None
    sampling["logprobs"] = top = _alternatives("top_logprobs", given.get("top_logprobs", 0))
    return top


def _alternatives(name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_TOP_LOGPROBS:
        raise wrong_value(name, value, f"a whole number from 0 to {MAX_TOP_LOGPROBS}")
    return value


def _include_usage(given: Mapping[str, Any]) -> bool:
    options = given.get("stream_options", {})
    if not isinstance(options, dict):
        raise invalid("stream_options", "'stream_options' must be an object")
    if options and not given.get("stream"):
        raise invalid("stream_options", "'stream_options' needs 'stream' = true")
    for name, value in options.items():
        if name not in ("include_usage", "include_obfuscation"):
            raise invalid("stream_options", f"unknown field {shown(name)} of 'stream_options'")
        if not isinstance(value, bool):
            raise invalid("stream_options", f"'{name}' must be true or false, not {shown(value)}")
    return bool(options.get("include_usage"))


def _boolean(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise wrong_value(name, value, "true or false")
    return value


def _text(given: Mapping[str, Any], name: str) -> str | None:
    value = given.get(name)
    if value is not None and not isinstance(value, str):
        raise wrong_value(name, value, "a string")
    if value is not None and len(value) > MAX_NAME_LENGTH:
        message = f"'{name}' has {len(value)} characters; the limit is {MAX_NAME_LENGTH}"
        raise invalid(name, message)
    return value
