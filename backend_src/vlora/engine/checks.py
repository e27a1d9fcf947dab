"""Checks of a request: its lengths, its `choices`, and whether its adapter can serve it."""

from __future__ import annotations

from vlora.adapters.handle import AdapterHandle, version_of
from vlora.config import Limits, Options
from vlora.errors import ADAPTER_CHANGED, InvalidArgument, Unavailable, prompt_too_long
from vlora.request import Request


def check_choices(choices: tuple[str, ...], limits: Limits) -> None:
    """Raise InvalidArgument if `choices`, with which every token is compared, is too long."""
    count, size = len(choices), sum(len(choice.encode()) for choice in choices)
    if count > limits.max_choices:
        raise InvalidArgument(f"'choices' holds {count} choices; the limit is {limits.max_choices}")
    if size > limits.max_choices_bytes:
        raise InvalidArgument(
            f"'choices' holds {size} bytes; the limit is {limits.max_choices_bytes}"
        )


def served_context(options: Options, checkpoint: int, pool: int) -> int:
    """Return the maximum number of tokens of a request, by its options, checkpoint and page pool.

    checkpoint, pool: number of tokens for which the checkpoint was made, and that the pool holds.

    Raises InvalidArgument if `max_model_len` is above either of them, or if the pool holds no
    token.
    """
    asked = options.max_model_len or checkpoint
    if asked > checkpoint:
        raise InvalidArgument(f"'max_model_len' = {asked} is above the checkpoint's {checkpoint}")
    if pool < 1 or (options.max_model_len and asked > pool):
        raise InvalidArgument(
            f"'kv_cache_tokens' = {options.kv_cache_tokens} cannot hold a context of {asked} tokens"
        )
    return min(asked, pool)


def admissible(
    request: Request,
    adapter: AdapterHandle | None,
    context: int,
    prompt: int,
    longest_choice: int = 0,
) -> int:
    """Check a request against its adapter, and return the maximum number of tokens of the answer.

    The checks depend on the adapter's version, so they run again when a waiting request changes it.

    context, prompt: numbers of tokens.
    longest_choice: maximum number of tokens that a choice can need; 0 without `choices`.

    Raises InvalidArgument, or Unavailable if the images have another version of the adapter.
    """
    _check_features(request, adapter)
    if request.use_head and (adapter is None or not adapter.info.head_labels):
        raise InvalidArgument(f"adapter {request.adapter!r} has no vision task head")
    max_tokens = answer_limit(request, prompt, context)
    if longest_choice > max_tokens:
        raise InvalidArgument(
            f"the longest of 'choices' needs {longest_choice} tokens; {max_tokens} are left for it"
        )
    return max_tokens


def _check_features(request: Request, adapter: AdapterHandle | None) -> None:
    """Raise Unavailable if the encoder and the engine used different versions of the adapter."""
    given = None if request.images is None else request.images.adapter_version
    has_part = adapter is not None and adapter.info.vision_ranks
    expected = version_of(adapter.stamp) if adapter is not None and has_part else ""
    if given is not None and given != expected:
        raise Unavailable(f"adapter {request.adapter!r} {ADAPTER_CHANGED}; send the request again")


def answer_limit(request: Request, prompt: int, context: int) -> int:
    """Return the maximum number of tokens of the answer; 0 for a vision task head."""
    if prompt < 1:
        raise InvalidArgument("the prompt is empty; give a text")
    least = 0 if request.use_head else 1
    available = context - prompt
    if available < least:
        raise prompt_too_long(prompt, context - least, "tokens", context)
    if request.use_head:
        return 0
    asked = request.sampling.max_tokens
    if asked is not None and asked > available:
        raise InvalidArgument(
            f"'max_tokens' = {asked} with a prompt of {prompt} tokens exceeds"
            f" the context of {context}; at most {available} are left"
        )
    return available if asked is None else asked
