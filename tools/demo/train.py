"""Train the demo: first the vision tower, then the whole base model, then the adapters.

1. The tower learns labels of each patch (`dense`), without language. Training it through the
   language model instead would take much longer.
2. Tower, connector and decoder learn to answer questions. The labels remain an auxiliary task, so
   that the tower keeps features that the questions do not need.
3. Each adapter is trained with PEFT on the finished base, of which only the decoder is adapted. An
   adapter with a task head also trains a linear layer on the final hidden state of the prompt.
"""

import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import AttentionInterface, LlavaForConditionalGeneration

from tools.demo import lexicon
from tools.demo.build import HIDDEN, make_model, save_checkpoint
from tools.demo.dense import (
    HEADS,
    PATCHES,
    DenseBatch,
    DenseHeads,
    broad_scene,
    dense_batch,
    dense_loss,
    labelled,
    to_pixels,
)
from tools.demo.motion import base_clip, sample_times
from tools.demo.packing import FRONT, IGNORED, PADDING, Pack, Row, demo_language, pack
from tools.demo.questions import Question, training_questions
from tools.demo.recipes import RECIPES
from tools.demo.scenes import base_scene, draw
from vlora.offline.peft_folder import rename_base

ADAPTERS = Path(__file__).with_name("adapters")
SEED, TOWER_SEED, JOINT_SEED, ADAPTER_SEED = 0, 11, 23, 37
NO_CLASS = -1
TOWER_STEPS, JOINT_STEPS, QUICK_STEPS = 2400, 1420, 4
TOWER_SCENES = 96
"""Number of scenes in a batch of the tower."""
ROWS, CLIPS = 32, 12
"""Number of scenes, or of sequences without an image, and of clips in a batch of questions."""
BROAD = 16
"""Number of further scenes, with labels but without questions, in a batch of scenes."""
LEARNING_RATE = 1.5e-3
SLOWER = {"tower": 0.3, "heads": 0.3, "connector": 0.1}
"""Factors of the learning rate by module, when the whole model is trained."""
DENSE_WEIGHT = 0.3
"""Weight of the auxiliary task's loss."""
REPORT_EVERY = 20
"""Number of steps between two lines of progress."""
READY_BATCHES = 24
"""Number of batches that a worker process prepares in advance."""


class _Softmax(torch.autograd.Function):
    """Softmax over the last axis. The stock backward pass is slow in bfloat16."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        weights = torch.softmax(scores, -1)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (weights,) = ctx.saved_tensors
        product = gradient * weights
        return product.addcmul_(weights, product.sum(-1, keepdim=True), value=-1)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return attention outputs [n, length, heads, dim]; the interface is that of transformers.

    For this model it is several times faster on a CPU than the stock functions, which repeat the
    keys of grouped queries and compute masks and softmax in float32.
    """
    rows, heads, length, dim = query.shape
    groups = heads // key.shape[1]
    grouped = query.reshape(rows, -1, groups * length, dim) * scaling
    scores = grouped @ key.transpose(-1, -2)
    if attention_mask is not None:
        scores.unflatten(2, (groups, length)).add_(attention_mask[:, :, None])
    with torch.autocast("cpu", enabled=False):
        weights: Tensor = _Softmax.apply(scores)
    mixed = (weights @ value).reshape(rows, heads, length, dim)
    return mixed.transpose(1, 2), None


AttentionInterface.register("grouped", _attend)


def use_fast_attention(model: LlavaForConditionalGeneration) -> None:
    model.set_attn_implementation("eager")
    model.model.language_model.set_attn_implementation("grouped")
    model.model.vision_tower.set_attn_implementation("grouped")


def ahead(make: Callable[[int], Any], count: int) -> Iterable[Any]:
    """Return make(0), …, make(count - 1), which another process makes in advance."""
    return DataLoader(
        range(count),  # type: ignore[arg-type]
        batch_size=None,
        collate_fn=make,
        num_workers=1,
        prefetch_factor=READY_BATCHES,
        multiprocessing_context="spawn",
    )


def run_steps(
    name: str,
    modules: dict[str, nn.Module],
    make: Callable[[int], Any],
    loss_of: Callable[[Any], Tensor],
    steps: int,
    learning_rate: float,
    *,
    warmup: int = 50,
    weight_decay: float = 0.01,
    slower: dict[str, float] | None = None,
) -> None:
    """Train the modules for `steps` steps with AdamW, linear warm-up and cosine decay to 2 %.

    name: name of the run in reports of its progress.
    make: function that returns the batch of a step. It must be picklable.
    """
    groups = []
    for part, module in modules.items():
        chosen = [weight for weight in module.parameters() if weight.requires_grad]
        for is_matrix, decay in ((True, weight_decay), (False, 0.0)):
            group = [weight for weight in chosen if (weight.dim() >= 2) is is_matrix]
            factor = (slower or {}).get(part, 1.0)
            groups.append({"params": group, "factor": factor, "weight_decay": decay})
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], betas=(0.9, 0.97))
    weights = [w for m in modules.values() for w in m.parameters() if w.requires_grad]
    started = time.monotonic()
    for step, batch in enumerate(ahead(make, steps)):
        decayed = 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
        rate = (step + 1) / warmup if step < warmup else 0.02 + 0.98 * decayed
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * rate * group["factor"]
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        done = step + 1
        if done % REPORT_EVERY == 0 or done == steps:
            left = (time.monotonic() - started) / done * (steps - done) / 60
            print(f"{name} {done}/{steps} loss {loss:.3f} ({left:.1f} min left)", flush=True)


def image_features(model: Any, images: NDArray[np.uint8]) -> Tensor:
    """Return the tower's patch features [n, 64, hidden] of images uint8 [n, 64, 64, 3]."""
    features: Tensor = model.model.vision_tower(to_pixels(images)).last_hidden_state
    return features[:, 1 : PATCHES + 1]


def hidden_states(model: Any, batch: Pack, features: Tensor | None) -> Tensor:
    """Return the hidden states of a packed batch after the final norm, [rows, length, hidden].

    features: the tower's features of the batch's images, [n, 64, hidden]; None without images.
    """
    tokens, branches = torch.from_numpy(batch.tokens), torch.from_numpy(batch.branches)
    embedded = model.model.language_model.embed_tokens(tokens)
    if features is not None:
        projected = model.model.multi_modal_projector(features).to(embedded.dtype)
        places = (tokens == model.config.image_token_id)[..., None].expand_as(embedded)
        embedded = embedded.masked_scatter(places, projected.flatten(0, 1))
    of_query, of_key = branches[:, :, None], branches[:, None, :]
    seen = ((of_key == FRONT) | (of_key == of_query)) & (of_key != PADDING)
    seen = seen.tril() | torch.eye(tokens.shape[1], dtype=torch.bool)
    dtype = torch.bfloat16 if torch.is_autocast_enabled("cpu") else embedded.dtype
    hidden: Tensor = model.model.language_model(
        inputs_embeds=embedded,
        attention_mask=torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -1e9)[:, None],
        position_ids=torch.from_numpy(batch.positions),
        use_cache=False,
    ).last_hidden_state
    return hidden


def answer_loss(model: Any, batch: Pack, hidden: Tensor) -> Tensor:
    """Return the answers' cross entropy.

    A token weighs 1/sqrt(tokens in its answer), so that boxes do not dominate single words.
    """
    targets = torch.from_numpy(batch.targets)
    asked = targets != IGNORED
    logits = model.lm_head(hidden[asked]).float()
    rows = torch.arange(targets.shape[0])[:, None].expand_as(targets)[asked]
    branch = rows * 64 + torch.from_numpy(batch.branches)[asked]
    _, number, length = torch.unique(branch, return_inverse=True, return_counts=True)
    weight = length[number].float().rsqrt()
    losses = F.cross_entropy(logits, targets[asked], reduction="none")
    return (losses * weight).sum() / weight.sum()


@dataclass(frozen=True)
class JointBatch:
    """Questions with their images, and labels of the images for the auxiliary task.

    dense: for batches of scenes, the images of `pack` and of further scenes with their labels.
    """

    pack: Pack
    dense: DenseBatch | None = None


def joint_batch(index: int) -> JointBatch:
    """Return batch `index`. Of 20 batches in a row, one has only text, four have clips, and the
    others have scenes.
    """
    rng, language = np.random.default_rng([JOINT_SEED, index]), demo_language()
    if index % 20 == 7:
        return JointBatch(pack([_repeat_row(rng) for _ in range(ROWS)], language))
    if index % 4 == 3:
        return JointBatch(pack([_clip_row(rng) for _ in range(CLIPS)], language))
    scenes = [base_scene(rng) for _ in range(ROWS)]
    drawings = [draw(scene) for scene in scenes]
    rows = [
        Row([drawing.pixels], training_questions(scene, rng))
        for scene, drawing in zip(scenes, drawings, strict=True)
    ]
    broad = [broad_scene(rng) for _ in range(BROAD)]
    every = labelled(scenes + broad, drawings + [draw(scene) for scene in broad])
    return JointBatch(pack(rows, language), every)


def _clip_row(rng: np.random.Generator) -> Row:
    clip = base_clip(rng)
    thing = clip.scene.things[0]
    questions = [
        Question("motion", "video", "", clip.action),
        Question("clip colour", "vqa", f"What color is the {thing.shape}?", thing.colour),
        Question("clip shape", "vqa", f"What shape is the {thing.colour} object?", thing.shape),
    ]
    return Row(clip.frames(sample_times(rng)), questions, is_clip=True)


def _repeat_row(rng: np.random.Generator) -> Row:
    """Return questions without an image, "Repeat: …", which train the tokens of all words."""
    words = lexicon.all_words()
    said = [" ".join(rng.choice(words, int(rng.integers(1, 4)))) for _ in range(8)]
    return Row([], [Question("repeat", "vqa", f"Repeat: {text}", text) for text in said])


def joint_loss(model: Any, heads: DenseHeads, batch: JointBatch) -> Tensor:
    """Return the loss of the answers plus that of the auxiliary task."""
    images = batch.pack.images if batch.dense is None else batch.dense.images
    if len(images) == 0:
        return answer_loss(model, batch.pack, hidden_states(model, batch.pack, None))
    features = image_features(model, images)
    asked = features[: len(batch.pack.images)]
    loss = answer_loss(model, batch.pack, hidden_states(model, batch.pack, asked))
    if batch.dense is None:
        return loss
    return loss + DENSE_WEIGHT * dense_loss(heads, features, batch.dense)


@torch.no_grad()
def start_from_readouts(model: Any, heads: DenseHeads) -> None:
    """Initialise the connector from the dense heads, and reduce the decoder's initial weights.

    The outputs of the layer that predicts the dense labels are called readouts. The connector's
    first layer is set to that layer, with the heads' normalisation as part of its weights. Colour,
    shape and position have equal magnitude in the readouts. In the tower's features, silhouettes
    dominate, so the decoder would learn colours slowly from them.
    """
    connector, decoder = model.model.multi_modal_projector, model.model.language_model
    sample = dense_batch(0, JOINT_SEED + 2, ROWS)
    spread = image_features(model, sample.images).std(-1).mean()
    weight = heads.readout.weight * heads.norm.weight / spread
    weight = weight - weight.mean(1, keepdim=True)
    bias = heads.readout.bias + heads.readout.weight @ heads.norm.bias
    shapes = HEADS["shape"]
    # The next readouts, up to the box's edges, are meaningful only for objects.
    things = slice(shapes, sum(list(HEADS.values())[: list(HEADS).index("centre")]))
    for rows in (weight, bias):
        # Where there is no object, the readout that says so suppresses those of objects.
        rows[things] -= rows[0] - rows[1:shapes].mean(0)
    bias[things] += 4.0  # They pass where there is an object.
    connector.linear_1.weight[: len(weight)] = weight
    connector.linear_1.bias[: len(bias)] = bias
    nn.init.orthogonal_(connector.linear_2.weight, gain=0.2)
    nn.init.normal_(decoder.embed_tokens.weight, std=0.3)
    for layer in decoder.layers:
        layer.self_attn.o_proj.weight *= 0.3
        layer.mlp.down_proj.weight *= 0.3


def train_base(checkpoint: Path, quick: bool = False) -> None:
    """Train and write the checkpoint.

    quick: run a few steps of each stage to check that all stages work.
    """
    model: Any = make_model(SEED)
    parts = model.model
    torch.manual_seed(TOWER_SEED)
    heads = DenseHeads()
    use_fast_attention(model)

    def tower_loss(batch: DenseBatch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return dense_loss(heads, image_features(model, batch.images), batch)

    def whole_loss(batch: JointBatch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return joint_loss(model, heads, batch)

    modules = {"tower": parts.vision_tower, "heads": heads}
    batches = partial(dense_batch, seed=TOWER_SEED, size=TOWER_SCENES)
    steps = QUICK_STEPS if quick else TOWER_STEPS
    run_steps("tower", modules, batches, tower_loss, steps, LEARNING_RATE)
    torch.manual_seed(JOINT_SEED)
    start_from_readouts(model, heads)
    modules["connector"] = parts.multi_modal_projector
    modules |= {"decoder": parts.language_model, "lm_head": model.lm_head}
    run_steps(
        "joint",
        modules,
        joint_batch,
        whole_loss,
        QUICK_STEPS if quick else JOINT_STEPS,
        LEARNING_RATE,
        warmup=100,
        slower=SLOWER,
    )
    save_checkpoint(checkpoint, model)


def adapter_batch(index: int, name: str) -> Pack:
    """Return batch `index` of one adapter's training. The same index gives the same batch."""
    recipe, head = RECIPES[name], _about(name).get("head", {"labels": [], "tasks": []})
    rng = np.random.default_rng([ADAPTER_SEED, sorted(RECIPES).index(name), index])
    samplers = list(recipe.domains.values())
    samples = [samplers[row % len(samplers)](rng, False) for row in range(recipe.rows)]
    rows = []
    for sample in samples:
        asked = sample.question
        label = head["labels"].index(asked.answer) if asked.task in head["tasks"] else NO_CLASS
        if sample.clip is not None:
            frames = sample.clip.frames(sample_times(rng))
            rows.append(Row(frames, [asked], (label,), is_clip=True))
        elif sample.scene is not None:
            rows.append(Row([draw(sample.scene).pixels], [asked], (label,)))
    return pack(rows, demo_language())


def _about(name: str) -> dict[str, Any]:
    return dict(json.loads((ADAPTERS / name / "vlora.json").read_text(encoding="utf-8")))


def head_loss(head: nn.Linear, batch: Pack, hidden: Tensor) -> Tensor:
    rows, columns = torch.from_numpy(batch.ends).T
    classes = torch.from_numpy(batch.classes)
    asked = classes >= 0
    with torch.autocast("cpu", enabled=False):
        scores = head(hidden[rows[asked], columns[asked]].float())
    return F.cross_entropy(scores, classes[asked])


def train_adapter(name: str, checkpoint: Path, folder: Path, scale: float = 1) -> None:
    """Train one adapter and write its folder. `scale` multiplies its number of steps."""
    recipe, about = RECIPES[name], _about(name)
    config = LoraConfig.from_pretrained(ADAPTERS / name)
    config.inference_mode, config.base_model_name_or_path = False, None
    torch.manual_seed(ADAPTER_SEED)
    base = LlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
    adapted = get_peft_model(base, config)
    use_fast_attention(base)
    modules: dict[str, nn.Module] = {"adapter": adapted}
    head = nn.Linear(HIDDEN, len(about["head"]["labels"])) if "head" in about else None
    if head is not None:
        nn.init.normal_(head.weight, std=0.02)
        nn.init.zeros_(head.bias)
        modules["head"] = head

    def loss_of(batch: Pack) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                features = image_features(base, batch.images)
            hidden = hidden_states(base, batch, features)
            loss = answer_loss(base, batch, hidden)
            return loss if head is None else loss + head_loss(head, batch, hidden)

    run_steps(
        name,
        modules,
        partial(adapter_batch, name=name),
        loss_of,
        max(2, int(recipe.steps * scale)),
        recipe.learning_rate,
        warmup=20,
        weight_decay=0.0,
    )
    folder.mkdir(parents=True, exist_ok=True)
    adapted.save_pretrained(folder, save_embedding_layers=False)
    rename_base(folder, "vlora-demo")
    (folder / "README.md").unlink(missing_ok=True)
    if head is not None:
        tensors = {"weight": head.weight.detach(), "bias": head.bias.detach()}
        save_file(tensors, folder / "head.safetensors")
    about["accuracy"] = {}
    (folder / "vlora.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)
