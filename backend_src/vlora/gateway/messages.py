"""Messages of a chat: their texts, and the images and clips in them.

They become JSON, in which texts and images are different parts. So nothing that a client writes
into a text can become a turn or an image. The server renders them with the checkpoint's chat
template or with that of a task.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vlora.errors import nearest, shown
from vlora.gateway.errors import invalid, unsupported, wrong_value
from vlora.request import FRAME_LIST
from vlora.tasks import RAW_TASK
from vlora.vision.chat_template import PLACEHOLDER, join_parts

# OpenAI's roles, with those of chat templates.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

# Valid values of an image's `detail`. They have no effect, because the checkpoint's image processor
# determines the resolution.
DETAILS = ("auto", "low", "high", "original")

# Fields of a message, each with the values that it may have. None stands for a field that `_Reader`
# reads and checks itself. The listed values of all other fields have no effect. `name` has no
# effect either, because chat templates take no names, nor has the `id` of an answer that a client
# sends back.
MESSAGE_FIELDS: Mapping[str, tuple[Any, ...] | None] = {
    "role": None,
    "content": None,
    "name": None,
    "id": None,
    "reasoning_content": None,
    "reasoning": ("",),
    "refusal": (),
    "audio": (),
    "function_call": (),
    "tool_calls": ([],),
    "annotations": ([],),
}

# Maximum number of images, videos and frames of a request. The server's limits are usually lower.
MAX_MEDIA = 1024

# Start of the URL of a video file.
FILE = re.compile(r"data:video/(mp4|webm|quicktime|x-matroska|mp2t);base64,|https?:", re.IGNORECASE)

MAX_HINT_LENGTH = 64  # Maximum length of an unknown field for which a similar field is suggested.

# Start of an error message about an image or a video, which are numbered from 0.
NUMBERED = re.compile(r"(image|video) (\d{1,4})\b")


@dataclass(frozen=True)
class Media:
    """URL of an image, a video file, or a list of frames. `param`: its path within the request."""

    url: str
    param: str

    @property
    def kind(self) -> str:
        return "video" if self.param.endswith("video_url.url") else "image"


@dataclass(frozen=True)
class Conversation:
    """Text and media of a request.

    text: JSON of the messages of a chat; the prompt of a completion or of the task `raw`.
    """

    text: str
    images: tuple[Media, ...] = ()
    videos: tuple[Media, ...] = ()

    @property
    def media(self) -> tuple[tuple[Media, ...], ...]:
        return self.images, self.videos

    def without_urls(self) -> Conversation:
        """Return a copy whose media have only their places, so that their content can be freed."""
        images, videos = (tuple(replace(one, url="") for one in media) for media in self.media)
        return Conversation(self.text, images, videos)

    def place_of(self, message: str) -> str | None:
        """Return the path of the image or video that a message of the server begins with."""
        found = NUMBERED.match(message)
        if found is None:
            return None
        media, number = getattr(self, f"{found[1]}s"), int(found[2])
        return media[number].param if number < len(media) else None


def read_messages(messages: Any, task: str | None, options: Mapping[str, bool]) -> Conversation:
    """Return the conversation in OpenAI's `messages`. Raises ApiError.

    task: the task that the request names. The only message of the task `raw` is a prompt.
    options: `add_generation_prompt` and `continue_final_message`, if the request has them.
    """
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", "'messages' must be a list with at least one message")
    reader = _Reader()
    turns = [reader.message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    images, videos = tuple(reader.images), tuple(reader.videos)
    if task == RAW_TASK:
        if len(turns) > 1:
            raise invalid("messages", f"the task '{RAW_TASK}' takes one message, the prompt")
        return Conversation(_raw_prompt(turns[0]["content"], len(videos)), images, videos)
    if options.get("continue_final_message") and turns[-1]["role"] != "assistant":
        message = "'continue_final_message' = true needs a last message of the role 'assistant'"
        raise invalid("continue_final_message", message)
    return Conversation(json.dumps({"messages": turns, **options}), images, videos)


def _raw_prompt(parts: list[dict[str, str]], num_videos: int) -> str:
    """Return the texts, with placeholders unless all images come first or a text has its own."""
    texts = [part["text"] for part in parts if part["type"] == "text"]
    if any(PLACEHOLDER in text for text in texts):
        return "\n".join(texts)
    return join_parts(parts, num_videos, "")


def check_keys(value: Mapping[str, Any], known: Collection[str], param: str, what: str) -> None:
    """Raise ApiError for the first key that is not known, unless it has no value."""
    for name, given in value.items():
        if name not in known and given is not None:
            name = name[:MAX_HINT_LENGTH]
            hint = nearest(name, known)
            raise invalid(f"{param}.{name}", f"unknown field {shown(name)} of {what}{hint}")


class _Reader:
    """Collects the media of messages, in order."""

    def __init__(self) -> None:
        self.images: list[Media] = []
        self.videos: list[Media] = []
        self._number = 0  # Of images, video files and frames of lists.

    def message(self, message: Any, param: str) -> dict[str, Any]:
        if not isinstance(message, dict):
            raise invalid(param, f"'{param}' must be an object with 'role' and 'content'")
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise wrong_value(f"{param}.role", role, f"one of {', '.join(ROLES)}")
        for name in ("name", "id", "reasoning_content"):
            if not isinstance(message.get(name, ""), str | None):
                raise invalid(f"{param}.{name}", f"'{param}.{name}' must be a string")
        check_keys(message, MESSAGE_FIELDS, param, "a message")
        for name, value in message.items():
            neutral = MESSAGE_FIELDS.get(name)
            if neutral is not None and value is not None and value not in neutral:
                refusal = f"'{name}' of a message is not supported; leave it out"
                raise unsupported(f"{param}.{name}", refusal)
        turn = {"role": ROLES[role], "content": self._content(message, f"{param}.content")}
        if reasoning := message.get("reasoning_content"):
            turn["reasoning_content"] = reasoning  # Some chat templates print it.
        return turn

    def _content(self, message: Any, param: str) -> list[dict[str, str]]:
        content = message.get("content")
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        if not isinstance(content, list) or not content:
            raise invalid(param, f"'{param}' must be a string or a list of parts")
        return [self._part(part, f"{param}[{i}]") for i, part in enumerate(content)]

    def _part(self, part: Any, param: str) -> dict[str, str]:
        kind = part.get("type") if isinstance(part, dict) else None
        value = part.get(kind) if isinstance(kind, str) else None
        if isinstance(part, dict):
            check_keys(part, ("type", str(kind)), param, f"'{param}'")
        if kind == "text":
            if not isinstance(value, str):
                raise invalid(param, f"'{param}.text' must be a string, not {shown(value)}")
            return {"type": "text", "text": value}
        if kind not in ("image_url", "video_url"):
            known = "'text', 'image_url' or 'video_url'"
            raise unsupported(f"{param}.type", f"'{param}.type' must be {known}, not {shown(kind)}")
        param = f"{param}.{kind}"
        if not isinstance(value, dict) or not isinstance(value.get("url"), str):
            raise invalid(param, f"'{param}' must be an object whose 'url' is a string")
        check_keys(value, ("url", "detail"), param, f"'{param}'")
        if (detail := value.get("detail")) not in (None, *DETAILS):
            raise wrong_value(f"{param}.detail", detail, f"one of {', '.join(DETAILS)}")
        if kind == "video_url":
            self._clip(value["url"], f"{param}.url")
            return {"type": "video"}
        if value["url"].startswith("data:video/"):
            raise invalid(f"{param}.url", f"'{param}.url' is a video; send it as a 'video_url'")
        self._check_number(1, param)
        self.images.append(Media(value["url"], f"{param}.url"))
        return {"type": "image"}

    def _clip(self, url: str, param: str) -> None:
        is_list = url.startswith(FRAME_LIST)
        if not is_list and not FILE.match(url):
            known = "mp4, webm, quicktime, x-matroska or mp2t"
            message = (
                f"'{param}' must be a video file, data:video/mp4;base64,… (or {known}) or an"
                f" http(s) URL, or a list of JPEG frames, {FRAME_LIST}FRAME,FRAME,…"
            )
            raise unsupported(param, message)
        self._check_number(url.count(",") if is_list else 1, param)
        self.videos.append(Media(url, param))

    def _check_number(self, more: int, param: str) -> None:
        self._number += more
        if self._number > MAX_MEDIA:
            message = f"the request has {self._number} or more images, videos and frames"
            raise invalid(param, f"{message}; the limit is {MAX_MEDIA}")
