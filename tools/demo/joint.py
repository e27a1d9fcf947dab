"""Stage 2 of making the demo: train tower, connector and decoder jointly to answer questions.

Dense labels remain an auxiliary task, so that the tower keeps features that the questions do not
need.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import LlavaForConditionalGeneration

from tools.demo import attention, lexicon
from tools.demo.ahead import ahead
from tools.demo.build import HIDDEN
from tools.demo.dense import HEADS, PATCHES, DenseBatch, broad_scene, dense_batch, labelled
from tools.demo.loop import Run, Stage
from tools.demo.motion import base_clip, sample_times
from tools.demo.packing import FRONT, IGNORED, PADDING, Pack, Row, pack
from tools.demo.questions import Question, training_questions
from tools.demo.scenes import base_scene, draw
from tools.demo.tower import DenseHeads, dense_loss, to_pixels

SEED = 23
ROWS = 32
"""Number of scenes, or of sequences without an image, in a batch."""
CLIPS = 12
"""Number of clips in a batch of clips."""
BROAD = 16
"""Number of further scenes, with labels but without questions, in a batch of scenes."""
LEARNING_RATE = 1.5e-3
SLOWER = {"tower": 0.3, "heads": 0.3, "connector": 0.1}
"""Factors of the learning rate by module."""
DENSE_WEIGHT = 0.3
"""Weight of the auxiliary task's loss."""
IMAGE_TOKEN = 3
GROUPS = 3
"""Number of query heads that share a KV head."""
SILENCING = 1.0
OPENING = 4.0
"""Constants of `start_from_readouts`. SILENCING says how strongly the readout "no object here"
suppresses the readouts of objects. OPENING is added to the bias of the readouts of objects, so that
they pass where there is an object.
"""


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
    rng = np.random.default_rng([SEED, index])
    if index % 20 == 7:
        return JointBatch(pack([_repeat_row(rng) for _ in range(ROWS)]))
    if index % 4 == 3:
        return JointBatch(pack([_clip_row(rng) for _ in range(CLIPS)]))
    scenes = [base_scene(rng) for _ in range(ROWS)]
    drawings = [draw(scene) for scene in scenes]
    rows = [
        Row([drawing.pixels], training_questions(scene, rng))
        for scene, drawing in zip(scenes, drawings, strict=True)
    ]
    broad = [broad_scene(rng) for _ in range(BROAD)]
    every = scenes + broad
    return JointBatch(pack(rows), labelled(every, drawings + [draw(scene) for scene in broad]))


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
    questions = []
    for _ in range(8):
        said = " ".join(rng.choice(words, int(rng.integers(1, 4))))
        questions.append(Question("repeat", "vqa", f"Repeat: {said}", said))
    return Row([], questions)


def start_from_readouts(model: LlavaForConditionalGeneration, heads: DenseHeads) -> None:
    """Initialise the connector from the dense heads, and reduce the decoder's initial weights.

    The outputs of the layer that predicts the dense labels are called readouts. The connector's
    first layer is set to that layer, with the heads' normalisation as part of its weights. Colour,
    shape and position have equal magnitude in the readouts. In the tower's features, silhouettes
    dominate, so the decoder would learn colours slowly from them.

    Some readouts are meaningful only for objects. In a patch without an object, the readout "no
    object here" suppresses them.
    """
    connector = model.model.multi_modal_projector
    with torch.no_grad():
        sample = dense_batch(0, SEED + 2, ROWS)
        spread = image_features(model, sample.images).std(-1).mean()
        weight = heads.readout.weight * heads.norm.weight / spread
        weight = weight - weight.mean(1, keepdim=True)
        bias = heads.readout.bias + heads.readout.weight @ heads.norm.bias
        shapes, things = HEADS["shape"], slice(HEADS["shape"], _first_row("centre"))
        for rows in (weight, bias):
            rows[things] -= SILENCING * (rows[0] - rows[1:shapes].mean(0))
        bias[things] += OPENING
        connector.linear_1.weight[: len(weight)] = weight
        connector.linear_1.bias[: len(bias)] = bias
        nn.init.orthogonal_(connector.linear_2.weight, gain=0.2)
        nn.init.normal_(model.model.language_model.embed_tokens.weight, std=0.3)
        for layer in model.model.language_model.layers:
            layer.self_attn.o_proj.weight *= 0.3
            layer.mlp.down_proj.weight *= 0.3


def _first_row(name: str) -> int:
    """Return the index of the first output of the dense head `name` among all readouts."""
    names = list(HEADS)
    return sum(HEADS[earlier] for earlier in names[: names.index(name)])


def use_fast_attention(model: LlavaForConditionalGeneration) -> None:
    """Switch decoder and tower to the attention that trains fastest on a CPU."""
    model.set_attn_implementation("eager")
    model.model.language_model.set_attn_implementation(attention.NAME)
    model.model.vision_tower.set_attn_implementation(attention.NAME)


def branch_mask(branches: Tensor) -> Tensor:
    """Return the additive mask [rows, 1, length, length]: 0 where a token may attend, else -1e9."""
    length = branches.shape[1]
    of_query, of_key = branches[:, :, None], branches[:, None, :]
    earlier = torch.ones(length, length, dtype=torch.bool).tril()
    seen = earlier & ((of_key == FRONT) | (of_key == of_query)) & (of_key != PADDING)
    seen = seen | torch.eye(length, dtype=torch.bool)
    mask = torch.zeros(seen.shape, dtype=torch.bfloat16).masked_fill(~seen, -1e9)
    return mask[:, None]


def image_features(model: LlavaForConditionalGeneration, images: NDArray[np.uint8]) -> Tensor:
    """Return the tower's patch features [n, 64, hidden] of images uint8 [n, 64, 64, 3]."""
    features: Tensor = model.model.vision_tower(to_pixels(images)).last_hidden_state
    return features[:, 1 : PATCHES + 1]


def hidden_states(
    model: LlavaForConditionalGeneration, batch: Pack, features: Tensor | None
) -> Tensor:
    """Return the hidden states of a packed batch after the final norm, [rows, length, hidden].

    features: the tower's features of the batch's images, [n, 64, hidden]; None without images.
    """
    tokens = torch.from_numpy(batch.tokens)
    embedded = model.model.language_model.embed_tokens(tokens)
    if features is not None:
        projected = model.model.multi_modal_projector(features).to(embedded.dtype)
        places = (tokens == IMAGE_TOKEN)[..., None].expand_as(embedded)
        embedded = embedded.masked_scatter(places, projected.reshape(-1, HIDDEN))
    hidden: Tensor = model.model.language_model(
        inputs_embeds=embedded,
        attention_mask=attention.grouped_mask(
            branch_mask(torch.from_numpy(batch.branches)), GROUPS
        ),
        position_ids=torch.from_numpy(batch.positions),
        use_cache=False,
    ).last_hidden_state
    return hidden


def answer_loss(
    model: LlavaForConditionalGeneration, batch: Pack, hidden: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """Return the answers' cross entropy, and figures: "loss" and, for each kind of question, the
    share of right answers.

    A token weighs 1/sqrt(tokens in its answer), so that boxes do not dominate single words.
    """
    targets = torch.from_numpy(batch.targets)
    asked = targets != IGNORED
    logits = model.lm_head(hidden[asked]).float()
    wanted = targets[asked]
    rows = torch.arange(targets.shape[0])[:, None].expand_as(targets)[asked]
    branch = rows * 64 + torch.from_numpy(batch.branches)[asked]
    _, number, length = torch.unique(branch, return_inverse=True, return_counts=True)
    weight = length[number].float().rsqrt()
    losses = nn.functional.cross_entropy(logits, wanted, reduction="none")
    loss = (losses * weight).sum() / weight.sum()
    wrong = (logits.argmax(-1) != wanted).float()
    right = torch.zeros(len(length)).index_add(0, number, wrong) == 0
    hits: dict[str, list[bool]] = {}
    for kind, is_right in zip(batch.kinds, right.tolist(), strict=True):
        hits.setdefault(kind, []).append(is_right)
    figures = {kind: sum(seen) / len(seen) for kind, seen in hits.items()}
    return loss, {"loss": float(loss.detach()), **figures}


def train_jointly(
    model: LlavaForConditionalGeneration, heads: DenseHeads, work: Path, steps: int
) -> None:
    """Train the whole model in place, with the dense heads as an auxiliary task."""
    torch.manual_seed(SEED)
    start_from_readouts(model, heads)
    use_fast_attention(model)
    stage = Stage("joint", steps, LEARNING_RATE, work / "joint.pt", warmup=100)
    modules = {
        "tower": model.model.vision_tower,
        "heads": heads,
        "connector": model.model.multi_modal_projector,
        "decoder": model.model.language_model,
        "lm_head": model.lm_head,
    }
    run = Run(stage, modules, slower=SLOWER)

    def loss_of(batch: JointBatch) -> tuple[Tensor, dict[str, float]]:
        with torch.autocast("cpu", torch.bfloat16):
            return joint_loss(model, heads, batch)

    with ahead(joint_batch, run.step, steps) as batches:
        run.train(batches, loss_of)


def joint_loss(
    model: LlavaForConditionalGeneration, heads: DenseHeads, batch: JointBatch
) -> tuple[Tensor, dict[str, float]]:
    """Return the loss of the answers plus that of the auxiliary task, and figures by name."""
    images = batch.pack.images
    if len(images) == 0:
        return answer_loss(model, batch.pack, hidden_states(model, batch.pack, None))
    if batch.dense is None:
        features = image_features(model, images)
        return answer_loss(model, batch.pack, hidden_states(model, batch.pack, features))
    features = image_features(model, batch.dense.images)
    hidden = hidden_states(model, batch.pack, features[: len(images)])
    loss, figures = answer_loss(model, batch.pack, hidden)
    side, _ = dense_loss(heads, features, batch.dense)
    return loss + DENSE_WEIGHT * side, figures
