"""Tests of the file of cameras: strict keys, defaults, hours, and secrets that stay secret."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from vlora.errors import InvalidArgument
from vlora.watch.config import Camera, Cameras, read_cameras

EXAMPLE = Path(__file__).parents[3] / "clients" / "cameras.yaml"


def read(folder: Path, content: Any, **variables: str) -> Cameras:
    path = folder / "cameras.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return read_cameras(path, variables)


def test_defaults_apply_to_all_cameras_and_paths_start_at_the_file(tmp_path: Path) -> None:
    content = {
        "defaults": {"frames": 3, "gate": {"threshold": 0.5}},
        "cameras": {
            "a": {"url": "clip.mp4", "gate": None},
            "b": {"url": "rtsp://host/x", "frames": 9},
            "c": {"url": "synthetic:3"},
        },
    }
    cameras = read(tmp_path, content).cameras
    assert [one.frames for one in cameras.values()] == [3, 9, 3]
    assert cameras["a"].url == str(tmp_path / "clip.mp4")
    assert cameras["a"].gate is None
    assert cameras["b"].gate is not None
    assert cameras["b"].period == cameras["b"].seconds == 1
    assert cameras["c"].url == "synthetic:3"


@pytest.mark.parametrize(
    ("camera", "message"),
    [
        ({"frame": 3}, r"cameras\.gate: unknown key 'frame'; did you mean 'frames'\?"),
        ({"frames": 0}, r"cameras\.gate\.frames is 0, but should be greater than or equal to 1"),
        ({"interval": 0.5}, r"interval is 0\.5, but chunks of 1 s may not overlap"),
        ({"regions": [0, 0, 1, 1]}, r"regions: must be a list of rectangles, .* not \[0, 0"),
        ({"regions": [[0.5, 0, 0.5, 1]]}, r"region \[0\.5, 0\.0, 0\.5, 1\.0\] must be \[left"),
        ({"hours": ["7-19"]}, r"must be like 'mon-fri 07:00-19:00'"),
        ({"hours": ["25:00-26:00"]}, "has a time that does not exist"),
        ({"sampling": {"priority": 1}}, "the key 'priority', which the camera's own keys set"),
        ({"url": "ftp://host/x"}, "begins with 'ftp://'; use rtsp, rtsps, http, https"),
        ({"url": "${CAMERA}"}, r"must begin with its protocol, as in rtsp://\$\{NAME\}"),
        ({"url": "rtsp://host/${CAMERA}"}, "the variable CAMERA of the environment is not set"),
        ({"url": "synthetic:x"}, "must be 'synthetic', or 'synthetic:7'"),
        ({"pace": "fast"}, "pace: fast is for files"),
        ({"asks": {}}, r"cameras\.gate\.asks must have questions by name"),
        ({"asks": {"a": {"size": 3}}}, r"cameras\.gate\.asks\.a: unknown key 'size'"),
        ({"asks": {"a": None}}, r"cameras\.gate\.asks\.a must have keys"),
        ({"asks": {"a": {"every": 0}}}, r"cameras\.gate:a\.every is 0"),
        ({"password_env": "CAMERA"}, "password_env needs a user in the URL"),
    ],
)
def test_a_mistake_is_named_with_its_key(
    camera: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgument, match=message) as caught:
        read(tmp_path, {"cameras": {"gate": {"url": "rtsp://host/x", **camera}}})
    assert "\n" not in str(caught.value)


def test_an_unknown_default_is_named(tmp_path: Path) -> None:
    content = {"defaults": {"intervall": 1}, "cameras": {"a": {"url": "x"}}}
    with pytest.raises(InvalidArgument, match="defaults: unknown key 'intervall'; did you mean"):
        read(tmp_path, content)


@pytest.mark.parametrize(
    "camera",
    [
        {"url": "rtsp://user:hunter2@host/x"},
        {"url": "rtsp://user:hunter2/and/more@host/x"},
        {"url": ["rtsp://user:hunter2@host/x"]},
        "rtsp://user:hunter2@host/x",
        {"url": "rtsp://user:hunter2@host/x", "frames": "rtsp://user:hunter2@host/x"},
        {"url": "x", "rtsp://user:hunter2@host/x": 1},
    ],
)
def test_no_error_shows_a_password_of_the_file(camera: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read(tmp_path, {"cameras": {"gate": camera}})
    assert "hunter2" not in str(caught.value)
    assert "cameras.gate" in str(caught.value)


def test_passwords_come_from_the_environment_and_are_not_shown(tmp_path: Path) -> None:
    secret = "a/b:c@d ${X}"
    urls = {
        "one": {"url": "rtsp://me:${PW}@host:554/x?token=${TOKEN}"},
        "two": {"url": "rtsp://me@host/x", "password_env": "PW"},
        "whole": {"url": "https://${WHOLE}"},
    }
    variables = {"PW": secret, "TOKEN": "t0k", "WHOLE": "me:pw@host/x.m3u8"}
    cameras = read(tmp_path, {"cameras": urls}, **variables).cameras
    quoted = "a%2Fb%3Ac%40d%20%24%7BX%7D"
    assert {name: one.full_url(variables) for name, one in cameras.items()} == {
        "one": f"rtsp://me:{quoted}@host:554/x?token=t0k",
        "two": f"rtsp://me:{quoted}@host/x",
        "whole": "https://me:pw@host/x.m3u8",
    }
    shown = {one.shown_url for one in cameras.values()}
    assert shown == {"rtsp://host:554/x", "rtsp://host/x", "https://${WHOLE}"}


@pytest.mark.parametrize(
    ("hours", "time", "is_watched"),
    [
        ((), "2026-11-28 03:00", True),
        (("mon-fri 07:00-19:00",), "2026-11-27 18:59", True),  # a Friday
        (("mon-fri 07:00-19:00",), "2026-11-27 19:00", False),
        (("mon-fri 07:00-19:00",), "2026-11-28 12:00", False),
        (("fri 22:00-06:00",), "2026-11-28 05:59", True),
        (("fri 22:00-06:00",), "2026-11-27 05:59", False),
        (("sat-mon 10:00-11:00",), "2026-11-29 10:30", True),
        (("08:00-09:00", "20:00-24:00"), "2026-11-28 23:59", True),
    ],
)
def test_hours_say_when_a_camera_is_watched(
    hours: tuple[str, ...], time: str, is_watched: bool
) -> None:
    camera = Camera.model_validate({"url": "synthetic", "hours": hours})
    assert camera.is_watched(datetime.fromisoformat(time)) is is_watched


def test_the_example_is_valid_also_with_what_is_commented_out(tmp_path: Path) -> None:
    assert set(read_cameras(EXAMPLE, {}).cameras) == {"yard", "belt", "door:motion", "door:action"}
    whole = re.sub(r"^#(?=  )", "", EXAMPLE.read_text(), flags=re.MULTILINE)
    cameras = read(tmp_path, whole, GATE_PASSWORD="x", DOCK_PASSWORD="y").cameras
    assert set(cameras) == {"yard", "belt", "door:motion", "door:action", "gate", "dock"}
