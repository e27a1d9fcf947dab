"""A small specification of a generation run, with its images."""

from __future__ import annotations

from pathlib import Path

import yaml
from PIL import Image

from vlora.generation.spec import Item, read_spec

ITEM = {"name": "digits", "task": "classify", "images": "digits", "required": 0.9}


def write_images(folder: Path) -> None:
    """Write 60 images of two labels and a base folder."""
    (folder / "base").mkdir()
    (folder / "base" / "config.json").write_text('{"model_type": "llava"}')
    for number in range(60):
        label = folder / "digits" / str(number % 2)
        label.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (number * 4, number, 0)).save(label / f"{number}.png")


def write_spec(folder: Path, **changes: object) -> Path:
    """Write a specification with these keys changed, and return its path."""
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump({"base": "base", "items": [ITEM], **changes}))
    return path


def item_of(folder: Path, **changes: object) -> Item:
    """Return the item of a specification, with these keys changed."""
    return read_spec(write_spec(folder, items=[{**ITEM, **changes}])).items[0]
