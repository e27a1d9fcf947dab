"""Checks of a request before it is queued, on the caller's thread."""

from __future__ import annotations

from vlora.config import Limits
from vlora.engine.checks import answer_limit, check_choices
from vlora.engine.memory import EngineMemory
from vlora.engine.request_state import RequestState
from vlora.engine.sequence import Sequence
from vlora.errors import InvalidArgument
from vlora.lora.store import AdapterStore
from vlora.memory.prefix import BlockDigests
from vlora.model.decoder_config import DecoderConfig
from vlora.model.inputs import PromptReader
from vlora.model.sampler import TokenSampler
from vlora.model.vocabulary import Vocabulary
from vlora.request import Request


class Admission:
    """Turns requests into the state that the engine queues. Safe to use from any thread."""

    def __init__(
        self,
        config: DecoderConfig,
        reader: PromptReader,
        adapters: AdapterStore,
        memory: EngineMemory,
        limits: Limits,
        max_model_len: int,
        merge_is_lossy: bool,
    ) -> None:
        self.reader = reader
        self._config = config
        self._adapters = adapters
        self._memory = memory
        self._limits = limits
        self._max_model_len = max_model_len
        self._merge_is_lossy = merge_is_lossy
        self._vocabulary = Vocabulary(reader.tokenizer, config.vocabulary)

    def prepare(self, request: Request) -> RequestState:
        """Check a request and tokenize its prompt; the result holds no pages yet.

        Raises a VLoraError if the request is refused.
        """
        params = request.sampling
        handle = None if request.adapter is None else self._adapters.handle(request.adapter)
        if request.use_head and (handle is None or not handle.info.head_labels):
            raise InvalidArgument(f"adapter {request.adapter!r} has no vision task head")
        vocabulary = self._config.vocabulary
        invalid = [t for t in params.stop_token_ids if not 0 <= t < vocabulary]
        if invalid:
            raise InvalidArgument(
                f"'stop_token_ids' holds {invalid[0]}; ids run from 0 to {vocabulary - 1}"
            )
        check_choices(params.choices, self._limits)
        if not request.prompt:
            raise InvalidArgument("the prompt is empty; give a text")
        self.reader.check_length(request.prompt, self._max_model_len)
        prompt = self.reader.read(request.prompt, request.images)
        context = min(self._max_model_len, self._memory.capacity(handle))
        max_tokens = answer_limit(request, len(prompt.ids), context)
        sampler = TokenSampler(params, request.id, self._config.eos_tokens, self._vocabulary)
        if sampler.choices is not None and sampler.choices.required_tokens > max_tokens:
            raise InvalidArgument(
                f"the longest of 'choices' needs {sampler.choices.required_tokens} tokens;"
                f" {max_tokens} are left for it"
            )
        digests = None
        if self._memory.prefix is not None:
            digests = BlockDigests(self._memory.block_size, prompt.feature_row, prompt.features)
            # Hash the prompt on this thread instead of the engine's.
            digests.up_to(prompt.ids, len(prompt.ids))
        sequence = Sequence(
            request,
            prompt,
            handle,
            max_tokens,
            self._memory.table(),
            digests,
            merge_is_lossy=self._merge_is_lossy,
        )
        return RequestState(sequence, sampler, self._vocabulary)
