"""Tests of `vlora watch` against a fake Triton server: sources, chunks, requests, changes."""

from __future__ import annotations

import json

import pytest

from tests.support.cameras import write_video


def test_a_file_read_fast_is_cut_into_chunks_and_every_chunk_is_answered(start, triton, tmp_path):
    write_video(tmp_path / "clip.mp4", 10, [index * 10 for index in range(25)])
    run = start(door={"url": "clip.mp4", "frames": 2, "pace": "fast", "adapter": "actions"})
    run.join()
    assert len(triton.requests) == len(run.records) == 3
    keys = json.loads(triton.requests[0]["sampling_parameters"][0])
    assert keys["lora_name"] == "actions"
    assert keys["supersede"]
    assert keys["deadline_ms"] == 4000
    assert triton.headers[0]["x-lora-adapter"] == f"actions/{keys['stream_id']}"
    assert {len(request["frames"]) for request in triton.requests} == {2}
    assert run["door"].reader.counts.drops == 0
    spans = [one["ended"] - one["began"] for one in run.records]
    assert spans == pytest.approx([0.5, 0.5, 0.4])
    assert all(one["result"]["text"] == "moving left" for one in run.records)
