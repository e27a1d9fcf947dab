"""What a request or the options may ask of the context, and of `choices`: refused with numbers."""

from __future__ import annotations

from vlora.config import Limits, Options
from vlora.errors import InvalidArgument
from vlora.request import Request


def check_choices(choices: tuple[str, ...], limits: Limits) -> None:
    """Their number and bytes: each token of such an answer is looked up among them."""
    count, size = len(choices), sum(len(choice.encode()) for choice in choices)
    if count > limits.max_choices:
        raise InvalidArgument(f"'choices' holds {count} choices; the limit is {limits.max_choices}")
    if size > limits.max_choices_bytes:
        raise InvalidArgument(
            f"'choices' holds {size} bytes; the limit is {limits.max_choices_bytes}"
        )


def context_of(options: Options, checkpoint: int, pool: int) -> int:
    """The context served: asked for, the checkpoint's, and what the pool can hold of one."""
    asked = options.max_model_len or checkpoint
    if asked > checkpoint:
        raise InvalidArgument(f"'max_model_len' = {asked} is above the checkpoint's {checkpoint}")
    if pool < 1 or (options.max_model_len and asked > pool):
        raise InvalidArgument(
            f"'kv_cache_tokens' = {options.kv_cache_tokens} cannot hold a context of {asked}"
        )
    return min(asked, pool)


def max_tokens_of(request: Request, prompt: int, context: int) -> int:
    """Tokens this answer may have; a prompt or a limit beyond the context is refused."""
    if prompt < 1:
        raise InvalidArgument("the prompt is empty; give a text")
    least = 0 if request.use_head else 1
    room = context - prompt
    if room < least:
        raise InvalidArgument(
            f"the prompt has {prompt} tokens; with at least {least} for the answer"
            f" it must fit the context of {context}"
        )
    if request.use_head:
        return 0
    asked = request.sampling.max_tokens
    if asked is not None and asked > room:
        raise InvalidArgument(
            f"'max_tokens' = {asked} with a prompt of {prompt} tokens exceeds"
            f" the context of {context}; at most {room} are left"
        )
    return room if asked is None else asked
