"""Train the base: build it, pretrain the tower, then train the whole model jointly."""

from pathlib import Path

import torch

from tools.demo.build import make_model, save_checkpoint
from tools.demo.joint import train_jointly
from tools.demo.tokenizer import make_tokenizer
from tools.demo.tower import train_tower

SEED = 0
TOWER_STEPS = 2400
JOINT_STEPS = 1420
QUICK_STEPS = 4


def train_base(checkpoint: Path, work: Path, quick: bool = False, threads: int = 1) -> None:
    """Train and write the checkpoint. An interrupted run resumes from the state in `work`.

    `quick` runs a few steps of each stage to check that all stages work.
    """
    torch.set_num_threads(threads)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, SEED)
    heads = train_tower(model, work, QUICK_STEPS if quick else TOWER_STEPS)
    train_jointly(model, heads, work, QUICK_STEPS if quick else JOINT_STEPS)
    save_checkpoint(checkpoint, model, tokenizer)
