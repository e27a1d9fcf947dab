"""The file of cameras that `vlora watch` reads: `cameras.yaml`.

Passwords are not in the file: it names variables of the environment. No message of this module
holds a password, not even one that somebody wrote into a URL.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import quote, urlsplit

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from vlora.errors import InvalidArgument, nearest, shown
from vlora.strict_yaml import VARIABLE, Float, Int, StrictModel, describe, fill_variables, read_yaml
from vlora.watch.page import PageOptions
from vlora.watch.pixels import Region
from vlora.watch.rules import AlertRule
from vlora.watch.sinks import SinkOptions
from vlora.watch.sources import SYNTHETIC
from vlora.watch.store import Retention

MAX_CAMERAS = 1000
FAST_DEADLINE_MS = 120_000.0  # None of the chunks of a file that is read fast is to be lost.
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
HOURS = re.compile(r"(?:([a-z]{3})(?:-([a-z]{3}))? )?(\d\d):(\d\d)-(\d\d):(\d\d)")
# Keys of a question. Cameras that are equal in all others share a stream.
QUESTION_KEYS = frozenset(
    ("adapter", "task", "question", "sampling", "every", "alerts", "priority", "deadline_ms")
)
# Sampling keys that other keys of a camera set.
OWN_SAMPLING = ("lora_name", "stream_id", "supersede", "deadline_ms", "priority")
STREAMS = ("rtsp", "rtsps", "http", "https")
# Also a password with a slash in it, which a URL may not have.
USER_PART = re.compile(r"(?<=://)[^\s'\"]*(?=@)")


class Gate(StrictModel):
    """When a chunk is not asked about because the scene has not changed.

    threshold: share of the cells of a small grey picture that must differ, inside the regions.
    every_seconds: an unchanged scene is asked about again after so long.
    """

    threshold: Annotated[Float, Field(gt=0, le=1)] = 0.01
    every_seconds: Annotated[Float, Field(gt=0)] = 60.0


class ClipBounds(StrictModel):
    """How much compressed video of a camera is kept for the clips of events."""

    seconds: Annotated[Float, Field(ge=0, le=3600)] = 60.0
    megabytes: Annotated[Float, Field(ge=0, le=4096)] = 32.0


class Hours(NamedTuple):
    """A time of day on some days. If it ends before it begins, it ends on the next day.

    first, last: days of the week, from 0. begin, end: minutes of the day.
    """

    first: int
    last: int
    begin: int
    end: int

    def include(self, time: datetime) -> bool:
        minute, day = time.hour * 60 + time.minute, time.weekday()
        if self.begin <= self.end:
            return self.begin <= minute < self.end and self._has(day)
        return (minute >= self.begin and self._has(day)) or (
            minute < self.end and self._has((day - 1) % 7)
        )

    def _has(self, day: int) -> bool:
        return (day - self.first) % 7 <= (self.last - self.first) % 7


def _read_hours(value: Any) -> Any:
    found = HOURS.fullmatch(str(value).lower())
    if found is None or not {*found.groups()[:2]} <= {None, *DAYS}:
        raise ValueError(f"must be like 'mon-fri 07:00-19:00' or '22:00-06:00', not {value!r}")
    first, last, *numbers = found.groups()
    hours, minutes = [int(n) for n in numbers[::2]], [int(n) for n in numbers[1::2]]
    if max(minutes) > 59 or max(h * 60 + m for h, m in zip(hours, minutes, strict=True)) > 1440:
        raise ValueError(f"{value!r} has a time that does not exist")
    begin, end = (h * 60 + m for h, m in zip(hours, minutes, strict=True))
    return Hours(DAYS.index(first or "mon"), DAYS.index(last or first or "sun"), begin, end)


def _read_url(value: Any) -> Any:
    if not isinstance(value, str) or not value.strip():
        # The value is not shown, since it may hold a password.
        raise ValueError("must be the text of a URL, a path, or 'synthetic'")
    if value.startswith("$"):
        raise ValueError("must begin with its protocol, as in rtsp://${NAME}, or be a path")
    kind, _, seed = value.partition(":")
    if kind == SYNTHETIC and not re.fullmatch(r"\d{0,9}", seed):
        raise ValueError(f"must be '{SYNTHETIC}', or '{SYNTHETIC}:7' for another video")
    scheme, separator, rest = value.partition("://")
    if separator and scheme not in STREAMS:
        raise ValueError(f"begins with {shown(scheme + separator)}; use {', '.join(STREAMS)}")
    host, _, path = rest.partition("/")
    user = host.rpartition("@")[0]
    if separator and "@" in path:
        raise ValueError("has an @ behind its host; write it as %40")
    password = user.partition(":")[2]
    if separator and VARIABLE.sub("", password):
        raise ValueError(
            "holds a password; put it into a variable of the environment, and write ${NAME} in its"
            " place"
        )
    return value


class Camera(StrictModel):
    """A camera, and a question about its chunks. With `asks`, there is one of it per question.

    url: `rtsp://`, `rtsps://`, `http://` or `https://` (also HLS), a video file, a folder of
        pictures, `/dev/video0`, or `synthetic` (`synthetic:3` draws another video).
    password_env: variable of the environment with the password of the user in the URL.
    adapter, task, question, sampling: as in a request to `video_analytics`.
    seconds, frames: length of a chunk, and the number of its frames that are sent.
    every: the question is about each chunk, or each second one, and so on.
    interval: seconds from the begin of a chunk to that of the next one; `seconds` if absent.
    size: longer side in pixels of what is sent. Frames are never enlarged.
    regions: only their bounding box is sent, and the gate looks only inside them.
    hours: local times at which the camera is watched; always if absent.
    priority: lower numbers are served first, and yield last when the server is full.
    deadline_ms: how long an answer may take; if absent, four intervals of its question, but at
        least 4000, and 120000 with the pace `fast`.
    pace, repeat: whether a file is read in real time or as fast as answers come, and again.
    fps: pictures a second of a folder or of the synthetic camera.
    timeout_seconds: silence after which the connection counts as lost.
    """

    url: Annotated[str, BeforeValidator(_read_url)]
    password_env: str | None = None
    adapter: str | None = None
    task: str | None = None
    question: str = ""
    sampling: dict[str, Any] = Field(default_factory=dict)
    every: Annotated[Int, Field(ge=1, le=1_000_000)] = 1
    seconds: Annotated[Float, Field(gt=0, le=600)] = 1.0
    frames: Annotated[Int, Field(ge=1, le=768)] = 6
    interval: Annotated[Float, Field(gt=0, le=86400)] | None = None
    size: Annotated[Int, Field(ge=16, le=8192)] = 448
    regions: tuple[Region, ...] = ()
    gate: Gate | None = None
    alerts: tuple[AlertRule, ...] = ()
    hours: tuple[Annotated[Hours, BeforeValidator(_read_hours)], ...] = ()
    priority: Annotated[Int, Field(ge=-(2**31), lt=2**31)] = 0
    deadline_ms: Annotated[Float, Field(ge=1, le=1e9)] | None = None
    pace: Literal["real", "fast"] = "real"
    repeat: bool = False
    fps: Annotated[Float, Field(gt=0, le=1000)] = 30.0
    transport: Literal["tcp", "udp"] = "tcp"
    timeout_seconds: Annotated[Float, Field(ge=0.1, le=600)] = 5.0
    clip: ClipBounds = ClipBounds()

    @field_validator("regions", mode="before")
    @classmethod
    def _has_rectangles(cls, value: Any) -> Any:
        rows = value if isinstance(value, list | tuple) else [None]
        if not all(isinstance(row, list | tuple) and len(row) == 4 for row in rows):
            raise ValueError(
                f"must be a list of rectangles, [[left, top, right, bottom], …], not {shown(value)}"
            )
        return value

    @field_validator("sampling")
    @classmethod
    def _leaves_own_keys(cls, sampling: dict[str, Any]) -> dict[str, Any]:
        if taken := [key for key in OWN_SAMPLING if key in sampling]:
            raise ValueError(f"has the key '{taken[0]}', which the camera's own keys set")
        return sampling

    @model_validator(mode="after")
    def _is_consistent(self) -> Camera:
        for region in self.regions:
            left, top, right, bottom = region
            if not (0 <= left < right <= 1 and 0 <= top < bottom <= 1):
                raise ValueError(
                    f"the region {[*region]} must be [left, top, right, bottom], as shares of the"
                    " picture from 0 to 1"
                )
        if self.interval is not None and self.interval < self.seconds:
            raise ValueError(
                f"interval is {self.interval:g}, but chunks of {self.seconds:g} s may not overlap;"
                f" it must be at least {self.seconds:g}"
            )
        if self.pace == "fast" and (self.scheme.startswith("rtsp") or self.url.startswith("/dev/")):
            raise ValueError("pace: fast is for files; a camera comes in real time")
        names = [rule.name for rule in self.alerts]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two alerts are named '{min(twice)}'")
        if self.password_env and not self.user:
            raise ValueError("password_env needs a user in the URL, as in rtsp://USER@HOST/")
        return self

    @property
    def period(self) -> float:
        """Seconds from the begin of a chunk to that of the next one."""
        return self.seconds if self.interval is None else self.interval

    @property
    def deadline(self) -> float:
        """Milliseconds that an answer may take."""
        usual = max(4000.0, 4000.0 * self.period * self.every)
        return self.deadline_ms or (FAST_DEADLINE_MS if self.pace == "fast" else usual)

    @property
    def stream(self) -> str:
        """All keys but those of the question, as text. Cameras in which they are equal share a
        connection and a decoder."""
        return self.model_dump_json(exclude=set(QUESTION_KEYS))

    @property
    def scheme(self) -> str:
        """Protocol of a stream in lower case; "" for anything else."""
        scheme, separator, _ = self.url.partition("://")
        return scheme if separator else ""

    @property
    def user(self) -> str:
        return self.url.partition("://")[2].split("/")[0].rpartition("@")[0] if self.scheme else ""

    @property
    def shown_url(self) -> str:
        """The URL without user and query, in which secrets are."""
        return USER_PART.sub("", self.url).replace("://@", "://").partition("?")[0]

    def is_watched(self, time: datetime) -> bool:
        return not self.hours or any(hours.include(time) for hours in self.hours)

    def full_url(self, variables: Mapping[str, str]) -> str:
        """Return the URL with its variables and the password. Raises InvalidArgument.

        In the part of the user, values are encoded, so a password may hold any characters.
        """

        def read(name: str) -> str:
            if name not in variables:
                raise InvalidArgument(f"the variable {name} of the environment is not set")
            return variables[name]

        def encoded(name: str) -> str:
            return quote(read(name), safe="")

        user, url = self.user, self.url
        if not user:
            return fill_variables(url, read)
        filled = fill_variables(user, encoded)
        if self.password_env:
            filled = f"{filled.partition(':')[0]}:{encoded(self.password_env)}"
        head, _, rest = url.partition(f"://{user}@")
        return f"{head}://{filled}@{fill_variables(rest, read)}"


class Cameras(StrictModel):
    """The file: cameras by name, defaults of their keys, and where alerts go.

    server: gRPC address of the server. page: without it, there is no page.
    """

    server: str = "127.0.0.1:8001"
    sinks: tuple[SinkOptions, ...] = ()
    retention: Retention = Retention()
    page: PageOptions | None = None
    defaults: dict[str, Any] = Field(default_factory=dict)
    cameras: Annotated[
        dict[Annotated[str, Field(min_length=1, max_length=100)], Camera],
        Field(min_length=1, max_length=MAX_CAMERAS),
    ]

    @model_validator(mode="before")
    @classmethod
    def _apply_defaults(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        defaults, cameras = value.get("defaults", {}), value.get("cameras")
        if not isinstance(defaults, dict) or not isinstance(cameras, dict):
            return value
        for key in defaults:
            if key not in Camera.model_fields or key == "url":
                hint = nearest(str(key), Camera.model_fields)
                raise ValueError(f"defaults: unknown key {shown(key)}{hint}")
        whole: dict[Any, Any] = {}
        for name, keys in cameras.items():
            if not isinstance(keys, dict):
                whole[name] = keys
                continue
            for one, found in _questions(name, {**defaults, **keys}).items():
                if one in whole:
                    raise ValueError(f"cameras: two are named {shown(one)}")
                whole[one] = found
        return {**value, "cameras": whole}

    def doubled(self) -> Iterator[str]:
        """Yield a sentence for each address that has several connections."""
        streams: dict[str, dict[str, str]] = {}
        for name, one in self.cameras.items():
            if one.scheme or one.url.startswith("/dev/"):
                streams.setdefault(one.url, {}).setdefault(one.stream, name)
        for names in streams.values():
            if len(names) > 1:
                told = " and ".join(names.values())
                yield f"{told} have one URL and different keys, so each decodes it; see `asks`"

    def changed(self, server: str | None, page: str | None) -> Cameras:
        """Return the file with another server, and a page at another address."""
        changes: dict[str, Any] = {} if server is None else {"server": server}
        if page is not None:
            options = self.page or PageOptions()
            changes["page"] = options.model_copy(update={"listen": page})
        return self.model_copy(update=changes)


def _questions(name: Any, keys: dict[Any, Any]) -> dict[Any, Any]:
    """Return one camera per question of `asks`, named NAME:QUESTION; without `asks`, NAME alone."""
    if "asks" not in keys:
        return {name: keys}
    asks = keys.pop("asks")
    if not isinstance(asks, dict) or not asks:
        raise ValueError(f"cameras.{name}.asks must have questions by name")
    for ask, own in asks.items():
        where = f"cameras.{name}.asks.{ask}"
        if not isinstance(own, dict):
            raise ValueError(f"{where} must have keys")
        for key in own:
            if key not in QUESTION_KEYS:
                hint = nearest(str(key), QUESTION_KEYS)
                raise ValueError(f"{where}: unknown key {shown(key)}{hint}")
    return {f"{name}:{ask}": {**keys, **own} for ask, own in asks.items()}


def read_cameras(path: Path, variables: Mapping[str, str] = os.environ) -> Cameras:
    """Return the cameras of a YAML file. Raises InvalidArgument, without passwords.

    Relative paths start at the folder of the file.
    """
    try:
        found = Cameras.model_validate(read_yaml(path))
    except ValidationError as error:
        raise InvalidArgument(f"{path}: {_without_users(describe(error))}") from None
    except InvalidArgument as error:
        raise InvalidArgument(_without_users(str(error))) from None
    cameras = {name: _located(one, path.parent) for name, one in found.cameras.items()}
    for name, camera in cameras.items():
        try:
            urlsplit(camera.full_url(variables))
        except (InvalidArgument, ValueError) as error:
            reason = error if isinstance(error, InvalidArgument) else "is not a valid URL"
            raise InvalidArgument(f"{path}: cameras.{name}.url: {reason}") from None
    return found.model_copy(update={"cameras": cameras})


def _without_users(message: str) -> str:
    return USER_PART.sub("***", message)


def _located(camera: Camera, folder: Path) -> Camera:
    if camera.scheme or camera.url.partition(":")[0] == SYNTHETIC:
        return camera
    return camera.model_copy(update={"url": str(folder / camera.url)})
