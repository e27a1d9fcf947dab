"""Train LoRA adapters on the finished base with PEFT, one at a time.

Only the decoder is adapted; vision tower, connector and base weights stay frozen. An adapter with a
task head also trains a linear layer on the final hidden state of the last prompt token.
"""

import json
from functools import partial
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlavaForConditionalGeneration

from tools.demo.build import HIDDEN
from tools.demo.motion import sample_times
from tools.demo.packing import Pack, Row, demo_language, pack
from tools.demo.recipes import RECIPES, Recipe, Sample
from tools.demo.scenes import draw
from tools.demo.train import (
    answer_loss,
    hidden_states,
    image_features,
    run_steps,
    use_fast_attention,
)
from vlora.generation.peft_folder import rename_base

SEED = 37
NO_CLASS = -1


def adapter_batch(index: int, name: str) -> Pack:
    """Return batch `index` of one adapter's training. The same index gives the same batch."""
    recipe = RECIPES[name]
    rng = np.random.default_rng([SEED, sorted(RECIPES).index(name), index])
    samplers = list(recipe.domains.values())
    samples = [samplers[row % len(samplers)](rng, False) for row in range(recipe.rows)]
    return pack([_row(recipe, sample, rng) for sample in samples], demo_language())


def _row(recipe: Recipe, sample: Sample, rng: np.random.Generator) -> Row:
    question = sample.question
    has_class = question.task in recipe.head_tasks
    label = recipe.labels.index(question.answer) if has_class else NO_CLASS
    if sample.clip is not None:
        return Row(sample.clip.frames(sample_times(rng)), [question], (label,), is_clip=True)
    assert sample.scene is not None
    return Row([draw(sample.scene).pixels], [question], (label,))


def lora_config(recipe: Recipe) -> LoraConfig:
    # The scale is 2; with rsLoRA it is √rank.
    return LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.rank if recipe.rs_lora else 2 * recipe.rank,
        use_rslora=recipe.rs_lora,
        target_modules=recipe.target_regex,
        rank_pattern=recipe.rank_pattern,
        alpha_pattern=recipe.alpha_pattern,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )


def head_loss(head: nn.Linear, batch: Pack, hidden: Tensor) -> Tensor:
    rows, columns = torch.from_numpy(batch.ends).T
    classes = torch.from_numpy(batch.classes)
    asked = classes >= 0
    with torch.autocast("cpu", enabled=False):
        scores = head(hidden[rows[asked], columns[asked]].float())
    return nn.functional.cross_entropy(scores, classes[asked])


def train_adapter(name: str, checkpoint: Path, folder: Path, work: Path, scale: float = 1) -> None:
    """Train one adapter and write its folder. `scale` multiplies its number of steps."""
    recipe = RECIPES[name]
    torch.manual_seed(SEED)
    base = LlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
    adapted = get_peft_model(base, lora_config(recipe))
    use_fast_attention(base)
    modules: dict[str, nn.Module] = {"adapter": adapted}
    head = nn.Linear(HIDDEN, len(recipe.labels)) if recipe.labels else None
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
        work / f"{name}.pt",
        modules,
        partial(adapter_batch, name=name),
        loss_of,
        max(2, int(recipe.steps * scale)),
        recipe.learning_rate,
        warmup=20,
        weight_decay=0.0,
    )
    save_adapter(recipe, adapted, head, folder)


def save_adapter(recipe: Recipe, adapted: PeftModel, head: nn.Linear | None, folder: Path) -> None:
    """Write the PEFT files in float32, the head, and vlora.json, in which `accuracy` is empty."""
    folder.mkdir(parents=True, exist_ok=True)
    adapted.save_pretrained(folder, save_embedding_layers=False)
    rename_base(folder, "vlora-demo")
    (folder / "README.md").unlink(missing_ok=True)
    about: dict[str, object] = {"tasks": list(recipe.tasks), "accuracy": {}}
    if head is not None:
        tensors = {"weight": head.weight.detach(), "bias": head.bias.detach()}
        save_file(tensors, folder / "head.safetensors")
        about["head"] = {"labels": list(recipe.labels), "tasks": list(recipe.head_tasks)}
    (folder / "vlora.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)
