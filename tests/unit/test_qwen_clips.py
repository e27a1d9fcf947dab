"""Sizes of the frames of clips in Qwen2-VL to Qwen3-VL, and the settings that limit them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers.models.qwen3_vl.video_processing_qwen3_vl import (
    Qwen3VLVideoProcessor,
    smart_resize,
)

from vlora.errors import InvalidArgument
from vlora.vision.families.qwen_vl import (
    clip_settings,
    frame_size_of_qwen2,
    frame_size_of_qwen3,
)

IMAGE = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 256, "longest_edge": 4096}}
PROCESSOR = SimpleNamespace(to_dict=lambda: IMAGE)


def test_frames_of_qwen3_have_the_size_that_the_stock_processor_gives_them() -> None:
    rng = np.random.default_rng(0)
    for case in range(400):
        frames, height, width = (int(side) for side in rng.integers((2, 3, 3), (9, 120, 120)))
        smallest = int(rng.integers(100, 5000))
        size = {"shortest_edge": smallest, "longest_edge": smallest * int(rng.integers(3, 30))}
        settings: dict[str, Any] = IMAGE | {"size": size}
        if case % 2:
            settings |= {"cap_pixels_per_frame": True, "max_video_tokens": int(rng.integers(3, 40))}
        found = frame_size_of_qwen3(settings, frames, height, width)
        stock = Qwen3VLVideoProcessor(**settings)
        patches = stock.get_num_of_video_patches(frames, height, width)
        assert -(-frames // 2) * found[0] * found[1] == patches * 16
        if not case % 2:
            assert found == smart_resize(frames, height, width, 2, 8, *size.values())


def test_a_clip_of_one_frame_has_the_size_of_two() -> None:
    assert frame_size_of_qwen3(IMAGE, 1, 20, 30) == frame_size_of_qwen3(IMAGE, 2, 20, 30)


@pytest.mark.parametrize(
    ("frames", "tokens", "expected"),
    [
        (8, None, (64, 64)),  # the limit of a frame, 4096 pixels
        (8, 100, (32, 32)),  # 90 tokens of 64 pixels for 4 pairs: 1440 pixels for each
        (8, 1, (16, 16)),  # at least 1.05 times the smallest size, 268 pixels
    ],
)
def test_frames_of_qwen2_are_limited_one_by_one(
    frames: int, tokens: int | None, expected: tuple[int, int]
) -> None:
    cap = {} if tokens is None else {"cap_pixels_per_frame": True, "max_video_tokens": tokens}
    assert frame_size_of_qwen2(IMAGE | cap, frames, 200, 200) == expected


def test_settings_are_found_where_transformers_finds_them(tmp_path: Path) -> None:
    def write(name: str, content: dict[str, Any]) -> None:
        (tmp_path / name).write_text(json.dumps(content))

    assert clip_settings(tmp_path, PROCESSOR) == IMAGE
    write("processor_config.json", {"processor_class": "Qwen3VLProcessor"})
    write("video_preprocessor_config.json", {"min_pixels": 9, "max_pixels": 99})
    limits = {"shortest_edge": 9, "longest_edge": 99}
    assert clip_settings(tmp_path, PROCESSOR)["size"] == limits
    write("processor_config.json", {"video_processor": {"size": {"shortest_edge": 1}}})
    assert clip_settings(tmp_path, PROCESSOR)["size"] == IMAGE["size"] | {"shortest_edge": 1}
    (tmp_path / "processor_config.json").write_text("{")
    with pytest.raises(InvalidArgument, match=r"processor_config\.json"):
        clip_settings(tmp_path, PROCESSOR)
