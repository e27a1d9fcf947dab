"""Checks of a request before it is queued. They run on the thread that submits the request."""

from __future__ import annotations

from vlora.config import Limits
from vlora.engine.checks import admissible, check_choices
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
from vlora.structured.grammars import Grammars, tokenizer_data


class Admission:
    """Checks requests and creates the `RequestState` objects that the engine queues. Thread-safe.

    merge_is_lossy: whether merged weights are rounded to a type of 16 bits (see
        `engine.sequence.mode_of`).
    """

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
        tokens = self._vocabulary.bytes_of
        self.grammars = Grammars(
            lambda: tokenizer_data(reader.tokenizer, tokens, config.vocabulary, config.eos_tokens),
            config.vocabulary,
            limits,
        )

    def prepare(self, request: Request) -> RequestState:
        """Check a request, tokenize its prompt and return its state, which holds no pages yet.

        If the request restricts its answer by a grammar, the grammar is compiled here, which may
        take some seconds. Raises a VLoraError if the request is refused.
        """
        params = request.sampling
        handle = None if request.adapter is None else self._adapters.handle(request.adapter)
        vocabulary = self._config.vocabulary
        invalid = [t for t in params.stop_token_ids if not 0 <= t < vocabulary]
        if invalid:
            raise InvalidArgument(
                f"'stop_token_ids' holds {invalid[0]}; ids run from 0 to {vocabulary - 1}"
            )
        check_choices(params.choices, self._limits)
        if params.structured_outputs is not None:
            if request.use_head:
                raise InvalidArgument(
                    "'structured_outputs' cannot be combined with a vision task head, which answers"
                    " with a label"
                )
            self.grammars.check(params.structured_outputs)
        if not request.prompt:
            raise InvalidArgument("the prompt is empty; give a text")
        self.reader.check_length(request.prompt, self._max_model_len)
        prompt = self.reader.read(request.prompt, request.images)
        sampler = TokenSampler(params, request.id, self._config.eos_tokens, self._vocabulary)
        longest_choice = 0 if sampler.choices is None else sampler.choices.required_tokens
        context = self._memory.context(handle)
        max_tokens = admissible(request, handle, context, len(prompt.ids), longest_choice)
        digests = None
        if self._memory.prefix is not None:
            digests = BlockDigests(self._memory.block_size, prompt.feature_row, prompt.features)
            # Hash the prompt on this thread instead of the engine's.
            digests.up_to(prompt.ids, len(prompt.ids))
        structure = params.structured_outputs
        grammar = None if structure is None else self.grammars.acquire(structure)
        sequence = Sequence(
            request,
            prompt,
            handle,
            max_tokens,
            self._memory.table(),
            digests,
            longest_choice=longest_choice,
            merge_is_lossy=self._merge_is_lossy,
        )
        return RequestState(sequence, sampler, self._vocabulary, grammar)
