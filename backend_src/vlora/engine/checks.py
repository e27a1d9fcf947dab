"""Limits on the context and on `choices`, and what a request needs of its adapter. Every error
states the value and the limit."""

from __future__ import annotations

from vlora.config import Limits, Options
from vlora.errors import InvalidArgument
from vlora.lora.handle import AdapterHandle
from vlora.request import Request


def check_choices(choices: tuple[str, ...], limits: Limits) -> None:
    """Raise InvalidArgument if there are too many choices or they have too many bytes in all.

    Both are limited because each token of such an answer is looked up among the choices.
    """
    count, size = len(choices), sum(len(choice.encode()) for choice in choices)
    if count > limits.max_choices:
        raise InvalidArgument(f"'choices' holds {count} choices; the limit is {limits.max_choices}")
    if size > limits.max_choices_bytes:
        raise InvalidArgument(
            f"'choices' holds {size} bytes; the limit is {limits.max_choices_bytes}"
        )


def served_context(options: Options, checkpoint: int, pool: int) -> int:
    """Return the context to serve, in tokens.

    checkpoint: the checkpoint's context. pool: tokens that the page pool can hold.
    Raises InvalidArgument if `max_model_len` exceeds either.
    """
    asked = options.max_model_len or checkpoint
    if asked > checkpoint:
        raise InvalidArgument(f"'max_model_len' = {asked} is above the checkpoint's {checkpoint}")
    if pool < 1 or (options.max_model_len and asked > pool):
        raise InvalidArgument(
            f"'kv_cache_tokens' = {options.kv_cache_tokens} cannot hold a context of {asked}"
        )
    return min(asked, pool)


def admissible(
    request: Request,
    adapter: AdapterHandle | None,
    context: int,
    prompt: int,
    longest_choice: int = 0,
) -> int:
    """Return the maximum number of tokens of the answer with this version of the adapter.

    Everything that depends on the version is checked here, on arrival and again whenever a waiting
    request is given another version.

    context: tokens that a request of this adapter may have. prompt: tokens of the prompt.
    longest_choice: tokens of the longest of `choices`.
    Raises InvalidArgument if the request cannot be served with it.
    """
    if request.use_head and (adapter is None or not adapter.info.head_labels):
        raise InvalidArgument(f"adapter {request.adapter!r} has no vision task head")
    max_tokens = answer_limit(request, prompt, context)
    if longest_choice > max_tokens:
        raise InvalidArgument(
            f"the longest of 'choices' needs {longest_choice} tokens; {max_tokens} are left for it"
        )
    return max_tokens


def answer_limit(request: Request, prompt: int, context: int) -> int:
    """Return the maximum number of tokens of the answer; 0 for a vision task head.

    prompt: tokens of the prompt. context: tokens that prompt and answer may have together.
    Raises InvalidArgument if the prompt or `max_tokens` exceeds the context.
    """
    if prompt < 1:
        raise InvalidArgument("the prompt is empty; give a text")
    least = 0 if request.use_head else 1
    available = context - prompt
    if available < least:
        raise InvalidArgument(
            f"the prompt has {prompt} tokens; with at least {least} for the answer"
            f" it must fit the context of {context}"
        )
    if request.use_head:
        return 0
    asked = request.sampling.max_tokens
    if asked is not None and asked > available:
        raise InvalidArgument(
            f"'max_tokens' = {asked} with a prompt of {prompt} tokens exceeds"
            f" the context of {context}; at most {available} are left"
        )
    return available if asked is None else asked
