"""Perplexity, accuracy and merging error of the server's decoder with one type of weight."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tools.demo.questions import Question
from tools.demo.scenes import draw
from tools.real_weights.checkpoint import questions_of, scene_of
from vlora.adapters.files import Adapter, AdapterInfo
from vlora.adapters.residency import Slots
from vlora.atmm.segments import signed_segments
from vlora.atmm.types import LoraPair
from vlora.config import Options
from vlora.ids import BASE
from vlora.memory.kv_cache import KVCache
from vlora.model.attention import AttentionPlan
from vlora.model.chunk import Chunk
from vlora.model.decoder import Decoder
from vlora.model.decoder_config import dtype_of, load_config, quantization_of
from vlora.model.inputs import text_prompt
from vlora.model.loader import adapter_shape, load_weights
from vlora.model.switcher import Switcher
from vlora.model.tokenizer import load_tokenizer
from vlora.vision.chat_template import PLACEHOLDER, ChatTemplate
from vlora.vision.encoder import VisionEncoder
from vlora.vision.images import DecodedImage
from vlora.vision.prompts import render
from vlora.weights.slab import WeightSlab

TYPES: tuple[dict[str, Any], ...] = (
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "float32", "quantization": "int8"},
    {"dtype": "float32", "quantization": "int8-dynamic"},
    {"dtype": "float32", "quantization": "int4", "quantization_group_size": 32},
    {"dtype": "float32", "quantization": "int4", "quantization_group_size": 64},
    {"dtype": "float32", "quantization": "int4", "quantization_group_size": 128},
    {"dtype": "bfloat16", "quantization": "int8"},
    {"dtype": "bfloat16", "quantization": "int4", "quantization_group_size": 32},
)
"""Sets of options whose perplexities are measured."""
SEED = 43
"""Seed of the scenes that training does not use, and of the random adapter."""
RANK, CHANGE = 16, 0.05
"""Rank of the random adapter, and norm of its change of a matrix relative to the matrix's norm."""


class Measured:
    """The server's decoder with one type of weight, and at most one adapter.

    matrix_bytes: size of the layers' matrices.
    """

    def __init__(
        self, folder: Path, options: dict[str, Any], longest: int, *, adapted: bool = False
    ) -> None:
        """Load the checkpoint, for texts of at most `longest` tokens.

        adapted: whether there is a random adapter, which all tokens use.
        """
        chosen = Options(model=folder, **options)
        self._config, dtype = load_config(folder), dtype_of(chosen.dtype, folder)
        weights = load_weights(folder, self._config, dtype, quantization_of(chosen, self._config))
        self.matrix_bytes = int(weights.slab.nbytes)
        slots = Slots(adapter_shape(folder, self._config, weights), dtype)
        self._switcher = Switcher(weights.slab, slots)
        self._decoder = Decoder(self._config, weights, slots, self._switcher)
        self._pages = tuple(range(-(-longest // chosen.block_size)))
        config, block = self._config, chosen.block_size
        pages = len(self._pages)
        self._cache = KVCache(pages, config.layers, block, config.kv_heads, config.head_dim, dtype)
        self._slot = BASE
        if adapted:
            assert isinstance(weights.slab, WeightSlab)
            adapter = random_adapter(weights.slab)
            slots.matrices = frozenset(adapter.pairs)
            self._slot = slots.take(adapter)
            slots.pack(self._slot)

    @torch.inference_mode()
    def logits(
        self,
        tokens: list[int],
        features: torch.Tensor | None = None,
        *,
        merged: bool = False,
        rows: int | None = None,
    ) -> torch.Tensor:
        """Return the logits after each token, [tokens, vocabulary].

        features: [n, hidden], which replace the n image tokens.
        rows: number of tokens of a step; None for all. Few rows use the kernels of decode steps.
        """
        self._switcher.switch(self._slot if merged else BASE)
        images = []
        if features is not None:
            first = tokens.index(self._config.image_token)
            images = [(first, torch.arange(len(features)), features.contiguous())]
        prompt = text_prompt(tuple(tokens))
        embedded = self._decoder.embed(torch.tensor(tokens), images).clone()
        results = []
        for start in range(0, len(tokens), rows or len(tokens)):
            step = tuple(tokens[start : start + (rows or len(tokens))])
            chunk = Chunk("text", self._slot, 0, start, step, prompt, self._pages, True)
            segments = signed_segments([(self._slot, len(step))], self._switcher.live)
            hidden = self._decoder.forward(
                embedded[start : start + len(step)],
                AttentionPlan(
                    [chunk],
                    self._cache,
                    self._config.heads,
                    fixed_order=self._decoder.fixed_order,
                ),
                segments,
                None,
                segments,
            )
            results.append(self._decoder.logits(hidden, segments))
        return torch.cat(results)


def texts_of(folder: Path, count: int, length: int) -> list[list[int]]:
    """Return `count` texts of `length` tokens from the topics of Python's language reference."""
    from pydoc_data.topics import topics

    tokenizer = load_tokenizer(folder)
    text = "\n\n".join(topics[name] for name in sorted(topics))[: count * length * 8]
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(tokens) >= count * length, "the reference is shorter than these texts"
    return [tokens[start : start + length] for start in range(0, count * length, length)]


@torch.inference_mode()
def stock(folder: Path, texts: Sequence[list[int]]) -> list[torch.Tensor]:
    """Return the logits of transformers' model in fp32 after each token of each text."""
    from transformers import LlavaForConditionalGeneration

    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    return [model(torch.tensor([text])).logits[0] for text in texts]


@dataclass(frozen=True)
class TextError:
    """Accuracy of a type of weights on texts.

    rms_error: root mean square of the error of the logits, relative to their standard deviation.
    matrix_bytes: size of the layers' matrices.
    """

    perplexity: float
    rms_error: float
    matrix_bytes: int

    def rounded(self) -> dict[str, float]:
        """Return what is printed."""
        return {
            "perplexity": round(self.perplexity, 4),
            "logits_rms_error": float(f"{self.rms_error:.2e}"),
            "matrix_mib": round(self.matrix_bytes / 2**20, 1),
        }


def served(
    folder: Path,
    texts: Sequence[list[int]],
    options: dict[str, Any],
    exact: Sequence[torch.Tensor],
    rows: int | None = None,
) -> TextError:
    """Compare the server's decoder with the exact logits of the texts."""
    decoder = Measured(folder, options, max(map(len, texts)))
    errors: list[torch.Tensor] = []

    def results() -> Iterator[tuple[torch.Tensor, list[int]]]:
        for text, expected in zip(texts, exact, strict=True):
            logits = decoder.logits(text, rows=rows).float()
            errors.append((logits - expected).square().mean())
            yield logits, text

    value = perplexity(results())
    spread = sum(expected.var() for expected in exact)
    return TextError(value, float(sum(errors) / spread) ** 0.5, decoder.matrix_bytes)


@dataclass(frozen=True)
class Asked:
    """A question about a held-out scene.

    tokens: the prompt with its image tokens, and the answer.
    features: image features, [n, hidden].
    answer: number of tokens of the answer.
    """

    question: Question
    tokens: list[int]
    features: torch.Tensor
    answer: int


def held_out(folder: Path, scenes: int) -> list[Asked]:
    """Return questions about scenes that training does not use, with the encoder's features."""
    template, tokenizer = ChatTemplate.from_checkpoint(folder), load_tokenizer(folder)
    encoder = VisionEncoder(folder, torch.get_num_threads())
    asked: list[Asked] = []
    for number in range(scenes):
        scene = scene_of(SEED, 1, number)
        features = torch.from_numpy(encoder.encode([DecodedImage(draw(scene).pixels)])[0])
        for question in questions_of(scene, SEED, 2, number):
            prompt = render(question.task, question.text, 1, 0, template)
            prompt = prompt.replace(PLACEHOLDER, PLACEHOLDER * len(features))
            texts = [prompt, question.answer + tokenizer.eos_token]
            ids, answer = tokenizer(texts, add_special_tokens=False)["input_ids"]
            asked.append(Asked(question, ids + answer, features, len(answer)))
    return asked


def accuracies(decoder: Measured, asked: Sequence[Asked]) -> dict[str, float]:
    """Return the share of right greedy answers, with the end after them, by kind of question."""
    hits: dict[str, list[bool]] = {}
    for one in asked:
        logits = decoder.logits(one.tokens, one.features)[-one.answer - 1 : -1]
        right = bool((logits.argmax(-1) == torch.tensor(one.tokens[-one.answer :])).all())
        hits.setdefault(one.question.kind, []).append(right)
    return {kind: round(sum(each) / len(each), 3) for kind, each in hits.items()}


def constant_accuracies(asked: Sequence[Asked]) -> dict[str, float]:
    """Return, by kind of question, the accuracy of always giving the most frequent answer."""
    answers: dict[str, list[str]] = {}
    for one in asked:
        answers.setdefault(one.question.kind, []).append(one.question.answer)
    most = {kind: max(map(each.count, each)) / len(each) for kind, each in answers.items()}
    return {kind: round(share, 3) for kind, share in most.items()}


def random_adapter(slab: WeightSlab) -> Adapter:
    """Return a random adapter of all projections, whose matrices B A have the norm CHANGE · W."""
    torch.manual_seed(SEED)
    pairs = {}
    for layer in range(slab.layers):
        for target, (d_out, d_in) in slab.shapes.items():
            a, b = torch.randn(RANK, d_in), torch.randn(d_out, RANK)
            b *= CHANGE * slab.target(layer, target).float().norm() / (b @ a).norm()
            pairs[layer, target] = LoraPair(a, b)
    info = AdapterInfo("random", "", (RANK,), tuple(slab.shapes), (), {}, (), ())
    return Adapter(info, pairs, None)


def merging_errors(
    decoder: Measured, texts: Sequence[list[int]], asked: Sequence[Asked]
) -> dict[str, float]:
    """Return how merging the adapter changes the logits of texts and images, and the perplexity.

    An error is the root mean square of the difference between merged and unmerged logits, divided
    by the standard deviation of the unmerged logits.
    """
    inputs = {
        "text": [(text, None) for text in texts],
        "image": [(one.tokens, one.features) for one in asked],
    }
    result: dict[str, float] = {}
    for name, cases in inputs.items():
        errors, spread = [], []
        for tokens, features in cases:
            unmerged = decoder.logits(tokens, features)
            merged = decoder.logits(tokens, features, merged=True)
            errors.append((merged - unmerged).square().mean())
            spread.append(unmerged.var())
        result[f"{name}_rms_error"] = float(f"{(sum(errors) / sum(spread)) ** 0.5:.2e}")
    for name, is_merged in (("perplexity", False), ("merged_perplexity", True)):
        value = perplexity((decoder.logits(text, merged=is_merged), text) for text in texts)
        result[name] = round(value, 4)
    return result


def perplexity(results: Iterable[tuple[torch.Tensor, list[int]]]) -> float:
    """Return the perplexity of texts, each with the logits after each of its tokens."""
    total, count = 0.0, 0
    for logits, text in results:
        expected = torch.tensor(text[1:])
        loss = torch.nn.functional.cross_entropy(logits[:-1].float(), expected, reduction="sum")
        total, count = total + float(loss), count + len(text) - 1
    return math.exp(total / count)
