"""A checkpoint's chat template, and conversations rendered with it.

A template is a program that sees only text. Everything that it must not take for text of its own
(special tokens that a client has written) and everything that it cannot print (images of a model
whose template knows no images) is replaced by a stand-in before the template runs.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from vlora.errors import InvalidArgument, prompt_too_long, shown
from vlora.request import Clip, PromptText
from vlora.strict_json import load_object

PLACEHOLDER = "<image>"  # Stands for an image, or a frame of the clip that is no file.
CLIP_PLACEHOLDER = "<video>"  # Stands for a clip, only if the request has video files.
PART_TYPES = ("text", "image", "video")
PART_ORDER = ("image", "video", "text")  # Order in which media stand before the text.
CHAT_KEYS = ("messages", "add_generation_prompt", "continue_final_message")
_SENTINEL = "VLORA-USER-TEXT"
# Python or JSON form of a part, which a template prints that takes only strings.
_PRINTED_PART = re.compile(r"""['"]type['"]""")


# Maximum number of special tokens in the texts of a prompt. Python is called for each, and no other
# request advances meanwhile. Written as text, each takes several tokens, so few contexts hold more.
MAX_STAND_INS = 32768
DIGITS = 6  # Hexadecimal digits of a stand-in's number, after the mark.


class StandIns:
    """Strings that stand for others while templates are applied. Clients cannot guess them."""

    def __init__(self) -> None:
        self._mark = ""  # Drawn for the first text, since most prompts have none.
        self._texts: list[tuple[str, Sequence[int] | None]] = []
        self._literals = 0

    def put_literal(self, text: str) -> str:
        """Return a stand-in for what is only text, whatever it spells.

        Raises InvalidArgument if there are too many.
        """
        if self._literals == MAX_STAND_INS:
            raise InvalidArgument(f"the texts have more than {MAX_STAND_INS} special tokens")
        self._literals += 1
        return self._put(text, None)

    def put_media(self, text: str, entries: Sequence[int]) -> str:
        """Return a stand-in for the text of images with these entries of the layout."""
        return self._put(text, entries)

    def _put(self, text: str, entries: Sequence[int] | None) -> str:
        self._mark = self._mark or secrets.token_hex(8)
        self._texts.append((text, entries))
        return f"{self._mark}{len(self._texts) - 1:0{DIGITS}x}"

    def resolve(self, rendered: str, is_complete: bool = False) -> PromptText:
        """Return the prompt with the texts in place of their stand-ins."""
        # A pattern with the mark would be compiled anew for each prompt.
        first, *others = rendered.split(self._mark) if self._mark else [rendered]
        parts, length = [first], len(first)
        literals: list[tuple[int, int]] = []
        order: list[int] = []
        for part in others:
            text, entries = self._texts[int(part[:DIGITS], 16)]
            if entries is None:
                literals.append((length, length + len(text)))
            else:
                order += entries
            parts += (text, part[DIGITS:])
            length += len(text) + len(part) - DIGITS
        if order == sorted(order):
            order = []
        return PromptText("".join(parts), tuple(literals), is_complete, tuple(order))


@dataclass(frozen=True)
class Chat:
    """A conversation. Each message has a `role` and a `content`.

    A content is a string, in which `<image>` stands for an image, or a list of parts of the types
    `text`, `image` and `video` (the next video file of the request, then the clip of all its
    frames). The text of a part never stands for anything else.

    add_generation_prompt: whether the prompt ends with the start of a new turn of the model.
    continue_final_message: whether the model continues the last message.
    """

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @classmethod
    def parse(cls, text: str, context: float = math.inf) -> Chat:
        """Return the conversation in JSON. Raises InvalidArgument.

        context: tokens of the context. Each message takes at least one.
        """
        what = "the text of task 'chat'"
        given = load_object(text, what)
        for name in given:
            if name not in CHAT_KEYS:
                known = ", ".join(CHAT_KEYS)
                raise InvalidArgument(f"{what} has the unknown key {shown(name)}; known: {known}")
        messages = given.get("messages")
        if isinstance(messages, list) and len(messages) > context:
            raise prompt_too_long(len(messages), context, "messages", int(context))
        if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
            raise InvalidArgument(
                f"{what} must be an object whose 'messages' is a list of objects with the string"
                " 'role' and with 'content', a string or a list of parts"
            )
        flags = {name: given.get(name, name == CHAT_KEYS[1]) for name in CHAT_KEYS[1:]}
        for name, value in flags.items():
            if not isinstance(value, bool):
                raise InvalidArgument(f"'{name}' must be true or false, not {shown(value)}")
        if all(flags.values()):
            raise InvalidArgument(
                "'continue_final_message' = true needs 'add_generation_prompt' = false"
            )
        return cls(messages, **flags)

    @property
    def clips(self) -> int:
        """Number of parts that are clips."""
        contents = (message["content"] for message in self.messages)
        lists = (content for content in contents if not isinstance(content, str))
        return sum(part["type"] == "video" for content in lists for part in content)


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    return isinstance(content, str) or (isinstance(content, list) and all(map(_is_part, content)))


def _is_part(part: Any) -> bool:
    if not isinstance(part, dict) or part.get("type") not in PART_TYPES:
        return False
    return part["type"] != "text" or isinstance(part.get("text"), str)


# Text for a clip: (number of frames, time of each in seconds, or ()) → text.
ClipText = Callable[[int, Sequence[float]], str]
# Renders messages: (messages, add_generation_prompt, continue_final_message) → text.
Apply = Callable[[Sequence[Mapping[str, Any]], bool, bool], str]


@dataclass(frozen=True)
class ChatTemplate:
    """Chat template of a checkpoint.

    prefix, suffix: text before and after the text of a single user turn. The suffix includes the
        start of the model's turn.
    image_text: text for one image in prompts of the checkpoint.
    clip_text: text for a clip; None if its frames are separate images.
    apply: renders several messages; None if the checkpoint has no chat template.
    takes_parts: whether the template takes a content as a list of parts.
    prints_images: whether it prints the image text for parts of type `image`.
    video_text: what it prints for a part of type `video`; None if nothing.
    structure: pattern of what a client's text must not be taken for: special tokens, placeholders.
    has_all_tokens: whether rendered messages need no further special tokens.
    """

    prefix: str
    suffix: str
    image_text: str = PLACEHOLDER
    clip_text: ClipText | None = None
    apply: Apply | None = field(default=None, compare=False, repr=False)
    takes_parts: bool = field(default=False, compare=False)
    prints_images: bool = field(default=False, compare=False)
    video_text: str | None = field(default=None, compare=False)
    structure: re.Pattern[str] = field(default=re.compile(PLACEHOLDER), compare=False, repr=False)
    has_all_tokens: bool = field(default=False, compare=False)

    def wrap(self, text: str) -> str:
        """Return `text` as one user turn."""
        return f"{self.prefix}{text}{self.suffix}"

    def as_text(self, text: str, stand_ins: StandIns, keep: Sequence[str] = ()) -> str:
        """Return a client's text with stand-ins for all structure in it but `keep`."""
        return self.structure.sub(
            lambda found: found[0] if found[0] in keep else stand_ins.put_literal(found[0]), text
        )

    @classmethod
    def from_checkpoint(cls, folder: str | Path) -> ChatTemplate:
        """Return the template of a checkpoint. As in transformers, a processor's template comes
        before its tokenizer's.

        Without a chat template, the prefix is the begin-of-text token, if there is one.

        Raises InvalidArgument for a template that fails or whose result does not contain the text
        of a user turn exactly once.
        """
        # The import is here because some processes need only the tasks.
        from vlora.model.tokenizer import load_tokenizer

        folder = Path(folder)
        file = folder / "config.json"
        config = json.loads(file.read_bytes()) if file.is_file() else {}
        tokenizer: Any = load_tokenizer(folder)
        about = {**_image_texts(config), "structure": _structure(tokenizer, config)}
        source = _template(folder, tokenizer)
        if source is None:
            return cls(prefix=tokenizer.bos_token or "", suffix="", **about)
        apply = partial(_apply, tokenizer, source)
        as_string, problem = _render_turn(apply, _SENTINEL)
        in_parts, in_parts_problem = _render_turn(apply, [{"type": "text", "text": _SENTINEL}])
        if in_parts is not None and _PRINTED_PART.search(in_parts):
            in_parts = None
        rendered = as_string if as_string is not None else in_parts
        if rendered is None:
            reason = problem or in_parts_problem
            raise InvalidArgument(f"the chat template of {folder} {reason}")
        prefix, suffix = rendered.split(_SENTINEL)
        if in_parts is not None:
            about |= {"takes_parts": True, **_printed_media(apply, tokenizer, config, about)}
        # As in transformers: a processor's tokens begin with a begin-of-text token in any case.
        has_all_tokens = "image_text" not in about
        return cls(prefix, suffix, apply=apply, has_all_tokens=has_all_tokens, **about)


def _render_turn(apply: Apply, content: Any) -> tuple[str | None, str]:
    """Return a user turn with the sentinel exactly once, or None and the problem."""
    try:
        rendered = apply([{"role": "user", "content": content}], True, False)
    except Exception as error:  # A template is a program and can fail in any way.
        return None, f"fails: {error}"
    if rendered.count(_SENTINEL) != 1:
        return None, "does not contain the user's text exactly once"
    return rendered, ""


def _apply(
    tokenizer: Any,
    source: str,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    continue_final_message: bool,
) -> str:
    rendered: str = tokenizer.apply_chat_template(
        list(messages),
        chat_template=source,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        tokenize=False,
    )
    return rendered


def _template(folder: Path, tokenizer: Any) -> str | None:
    """Return the text of the chat template; None without one."""
    # transformers 5 writes one file for processor and tokenizer. The others are the processor's,
    # as transformers 4 writes them.
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    for name in ("chat_template.json", "processor_config.json"):
        file = folder / name
        if not file.is_file():
            continue
        try:
            template = json.loads(file.read_bytes()).get("chat_template")
        except (ValueError, AttributeError, RecursionError) as error:
            raise InvalidArgument(f"{file} cannot be read: {error!r}") from error
        if isinstance(template, str):
            return template
        if template is not None or name == "chat_template.json":
            raise InvalidArgument(
                f"{file} cannot be read: it must give 'chat_template' as a string"
            )
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None


def _image_texts(config: Mapping[str, Any]) -> dict[str, Any]:
    from vlora.vision.families.base import vision_family

    family = vision_family(config.get("model_type", ""))
    if family is None:
        return {}
    return {"image_text": family.image_text, "clip_text": family.clip_text}


def _token(tokenizer: Any, config: Mapping[str, Any], kind: str) -> str | None:
    """Return the configuration's token of an image or a video."""
    for name in (f"{kind}_token_id", f"{kind}_token_index"):
        if isinstance(config.get(name), int):
            text = tokenizer.convert_ids_to_tokens(config[name])
            return text if isinstance(text, str) else None
    return None


def _structure(tokenizer: Any, config: Mapping[str, Any]) -> re.Pattern[str]:
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    media = {_token(tokenizer, config, kind) for kind in ("image", "video")}
    words = {PLACEHOLDER, *special, *tokenizer.all_special_tokens, *media} - {None, ""}
    # The longest first, since a pattern takes the first alternative that fits.
    return re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))))


def _printed_media(
    apply: Apply, tokenizer: Any, config: Mapping[str, Any], about: Mapping[str, Any]
) -> dict[str, Any]:
    """Return `prints_images` and `video_text` of a template that takes parts."""
    if "image_text" not in about:
        return {}
    text = {"type": "text", "text": _SENTINEL}
    with_image, _ = _render_turn(apply, [{"type": "image"}, text])
    with_video, _ = _render_turn(apply, [{"type": "video"}, text])
    image_text = about["image_text"]
    image, video = (_token(tokenizer, config, kind) for kind in ("image", "video"))
    forms = [] if video is None else [video]
    if image is not None and video is not None:
        forms.insert(0, image_text.replace(image, video))
    return {
        "prints_images": with_image is not None and with_image.count(image_text) == 1,
        "video_text": next((form for form in forms if form in (with_video or "")), None),
    }


class Media:
    """Puts the images and clips of one request into its prompt, as stand-ins.

    images, frames: number of images, and of the frames of the clip that is no file.
    videos: number of video files.
    placeholders: what stands for an image or a clip in a text.
    """

    def __init__(
        self,
        images: int,
        frames: int,
        videos: Sequence[Clip],
        template: ChatTemplate,
        stand_ins: StandIns,
    ) -> None:
        self.images, self.frames, self.videos = images, frames, len(videos)
        self.placeholders = (PLACEHOLDER, CLIP_PLACEHOLDER) if videos else (PLACEHOLDER,)
        self._image_text = template.image_text
        self._stand_ins = stand_ins
        self._placed = 0
        # Text and entries in the layout of each clip that is not placed yet.
        self._clips: deque[tuple[str, range]] = deque()
        end = images
        for count, seconds in [*((one.frames, one.seconds) for one in videos), (frames, ())]:
            text = self._image_text * count
            if template.clip_text is not None and count:
                text = template.clip_text(count, seconds)
            start, end = end, end + text.count(self._image_text)
            self._clips.append((text, range(start, end)))
        text, self._frames = self._clips[-1]
        self._is_joined = text != self._image_text * frames

    def next_image(self) -> str:
        """Return the stand-in for the next image or, after these, the next frame."""
        number = self._placed
        self._placed += 1
        frame = number - self.images
        entries = (number,) if frame < 0 else self._frames[frame : frame + 1]
        return self._stand_ins.put_media(self._image_text, entries)

    def next_clip(self) -> str:
        """Return the stand-in for the next video file or, after these, the clip of frames."""
        return self._stand_ins.put_media(*self._clips.popleft())

    def next_frames(self) -> list[str]:
        """Return stand-ins for the separate images of the next clip."""
        _, entries = self._clips.popleft()
        return [self._stand_ins.put_media(self._image_text, (entry,)) for entry in entries]

    def place(self, text: str) -> str:
        """Return the text with stand-ins for its placeholders. Raises InvalidArgument if the frames
        are taken as one video but are not adjacent.
        """
        if self._is_joined and text.count(PLACEHOLDER) > self.images - self._placed:
            before, found, after = text.rpartition(PLACEHOLDER * self.frames)
            if not found or PLACEHOLDER in after:
                raise InvalidArgument(
                    f"this model takes the {self.frames} frames as one video, so their"
                    f" {PLACEHOLDER} placeholders must follow each other, after those of all"
                    " images; send single pictures as 'image'"
                )
            stand_in = self._stand_ins.put_media(*self._clips.pop())
            text = f"{before}{stand_in}{after}"
        return re.sub(
            "|".join(self.placeholders),
            lambda found: self.next_image() if found[0] == PLACEHOLDER else self.next_clip(),
            text,
        )

    def check(self, what: str, images: int, clips: int, more: str) -> None:
        """Raise InvalidArgument if there is not one place for each image, video and frame.

        images: number of placeholders for images and frames.
        clips: number of places for clips.
        """
        if clips == self.videos + 1 and self.frames:  # The last one stands for the clip of frames.
            images, clips = images + self.frames, self.videos
        if (images, clips) == (self.images + self.frames, self.videos):
            return
        has, asked = f"{images} {PLACEHOLDER} placeholders", f"{self.images} images"
        if self.videos or clips:
            has = f"{images} {PLACEHOLDER} and {clips} {CLIP_PLACEHOLDER} placeholders"
            asked = f"{self.images} images, {self.videos} videos"
        raise InvalidArgument(
            f"the {what} {has} but the request has {asked} and {self.frames} frames; write one for"
            f" each{more}"
        )


def render_chat(
    chat: Chat, images: int, frames: int, template: ChatTemplate, videos: Sequence[Clip] = ()
) -> PromptText:
    """Return the prompt of a conversation, with the checkpoint's text for each image and clip.

    A template that takes only strings gets the parts of a content joined by line breaks.

    Raises InvalidArgument if the conversation has not one place for each image and clip, and if
    the template refuses it.
    """
    stand_ins = StandIns()
    media = Media(images, frames, videos, template, stand_ins)
    _check_places(chat, media)
    places = _Places(template, stand_ins, media)
    messages = [
        {
            # The role, and text such as `reasoning_content`, which some templates print.
            **{
                name: template.as_text(value, stand_ins) if isinstance(value, str) else value
                for name, value in message.items()
            },
            "content": places.content(message["content"]),
        }
        for message in chat.messages
    ]
    if template.apply is None:
        if len(messages) > 1 or chat.continue_final_message:
            raise InvalidArgument(
                "the checkpoint has no chat template, so a chat must have one message only"
            )
        content = messages[0]["content"]
        rendered = template.wrap(content if isinstance(content, str) else "")
    else:
        try:
            rendered = template.apply(
                messages, chat.add_generation_prompt, chat.continue_final_message
            )
        except Exception as error:  # A template is a program and can fail in any way.
            raise InvalidArgument(
                f"the checkpoint's chat template refuses the messages: {error}"
            ) from error
    return stand_ins.resolve(places.fill(rendered), template.has_all_tokens)


def _check_places(chat: Chat, media: Media) -> None:
    count, clips = 0, chat.clips
    for message in chat.messages:
        content = message["content"]
        if isinstance(content, str):
            count += content.count(PLACEHOLDER)
            clips += content.count(CLIP_PLACEHOLDER) if media.videos else 0
        else:
            count += sum(part["type"] == "image" for part in content)
    media.check("messages have", count, clips, "")


class _Places:
    """Converts contents to what a template takes, and fills in what it prints for media."""

    def __init__(self, template: ChatTemplate, stand_ins: StandIns, media: Media) -> None:
        self._template = template
        self._stand_ins = stand_ins
        self._media = media
        # Stand-ins for what the template prints, the next one first, by the text that it prints.
        self._printed: dict[str, deque[str]] = {}
        if template.prints_images:
            self._printed[template.image_text] = deque()
        if template.video_text is not None and template.clip_text is not None:
            self._printed[template.video_text] = deque()

    def content(self, content: str | Sequence[Mapping[str, Any]]) -> Any:
        template = self._template
        if isinstance(content, str):
            text = template.as_text(content, self._stand_ins, keep=self._media.placeholders)
            text = self._media.place(text)
            return [_text(text)] if template.takes_parts else text
        parts = [one for part in content for one in self._parts(part)]
        if template.takes_parts:
            return parts
        return "\n".join(part["text"] for part in parts)

    def _parts(self, part: Mapping[str, Any]) -> list[dict[str, str]]:
        template, media = self._template, self._media
        if part["type"] == "text":
            return [_text(template.as_text(part["text"], self._stand_ins))]
        if part["type"] == "image":
            return self._printed_as(template.image_text, "image", [media.next_image()])
        if template.clip_text is not None:
            return self._printed_as(template.video_text, "video", [media.next_clip()])
        return self._printed_as(template.image_text, "image", media.next_frames())

    def _printed_as(
        self, text: str | None, kind: str, stand_ins: list[str]
    ) -> list[dict[str, str]]:
        if text not in self._printed:
            return [_text(stand_in) for stand_in in stand_ins]
        self._printed[text] += stand_ins
        return [{"type": kind} for _ in stand_ins]

    def fill(self, rendered: str) -> str:
        """Return the rendered conversation with stand-ins for what the template prints."""
        texts = sorted(self._printed, key=len, reverse=True)

        def stand_in(found: re.Match[str]) -> str:
            waiting = self._printed[found[0]]
            return waiting.popleft() if waiting else found[0]

        return re.sub("|".join(map(re.escape, texts)), stand_in, rendered) if texts else rendered


def join_parts(parts: Sequence[Mapping[str, str]], videos: int, frames: str) -> str:
    """Return the texts of a content's parts, with placeholders unless all images come first, and
    then all clips.

    videos: number of video files.
    frames: text that stands for the clip of frames.
    """
    kinds = [PART_ORDER.index(part["type"]) for part in parts]
    if sorted(kinds) == kinds:
        return "\n".join(part["text"] for part in parts if part["type"] == "text")
    clips = iter([CLIP_PLACEHOLDER] * videos)
    return "".join(
        part["text"]
        if part["type"] == "text"
        else PLACEHOLDER
        if part["type"] == "image"
        else next(clips, frames)
        for part in parts
    )


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
