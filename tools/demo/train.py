"""Trains the base: builds it, teaches the tower to see, then everything to answer."""

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
    """Train and write the checkpoint. Resumes from what lies in `work`.

    `quick` takes a few steps of each stage, to see that all of it runs.
    """
    torch.set_num_threads(threads)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, SEED)
    heads = train_tower(model, work, QUICK_STEPS if quick else TOWER_STEPS)
    train_jointly(model, heads, work, QUICK_STEPS if quick else JOINT_STEPS)
    save_checkpoint(checkpoint, model, tokenizer)
