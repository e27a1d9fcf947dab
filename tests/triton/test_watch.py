"""Test of `vlora watch` with synthetic cameras against a real server of the demo."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.cameras import WatchRun
from tests.support.polling import until
from vlora.launcher.server import TritonServer


def rules_of(folder: Path) -> set[str]:
    return {json.loads(path.read_bytes())["rule"] for path in folder.glob("*.json")}


def test_cameras_with_adapters_of_their_own_are_answered_and_raise_alerts(
    demo_server: TritonServer, tmp_path: Path
) -> None:
    rule = {"name": "motion", "when": {"contains": "moving"}, "begin": "1 of 2"}
    common = {"task": "video", "deadline_ms": 60_000.0}
    cameras = {
        "yard": {"url": "synthetic:1", "alerts": [rule], "clip": {"megabytes": 0}, **common},
        "door": {
            "url": "synthetic:3",
            "task": "vqa",
            "question": "Is there a circle in the picture?",
            "sampling": {"word_probabilities": ["no"]},
            "alerts": [{"name": "circle", "when": {"yes_probability": 0.0}}],
            "deadline_ms": 60_000.0,
        },
        "belt": {"url": "synthetic:2", "adapter": "actions", "priority": 1, **common},
    }
    run = WatchRun(tmp_path, demo_server.grpc_url, cameras)
    run.start()
    try:
        for name in cameras:
            until(lambda name=name: run[name].counts.answered >= 4, 120)
        until(lambda: rules_of(tmp_path / "kept" / "events") == {"motion", "circle"})
    finally:
        run.stop()
    assert run["yard"].counts.errors == run["belt"].counts.errors == 0
    records = [one for one in run.records if one["camera"] == "yard"]
    # The demo's base model does not recognise that nothing moves.
    known = [one for one in records if one["truth"] != "standing still"]
    assert all(one["result"]["text"] == one["truth"] for one in known)
    adapters = {
        (one["camera"], (one["result"]["adapter"] or {}).get("name")) for one in run.records
    }
    assert adapters == {("yard", None), ("door", None), ("belt", "actions")}
    for one in run.records:
        words = one["result"].get("word_probabilities")
        assert (words is None) == (one["camera"] != "door")
        assert words is None or (words["yes"] > words["no"]) == (one["result"]["text"] == "yes")
    assert run["belt"].last is not None
    assert len(run["belt"].last.digest) == 64
