"""A checkpoint's chat template, and conversations rendered with it.

A template is a program that sees only text. Everything that it must not take for text of its own
(special tokens that a client has written) and everything that it cannot print (images of a model
whose template knows no images) is replaced by a stand-in before the template runs.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from vlora.errors import InvalidArgument, shown
from vlora.request import PromptText
from vlora.strict_json import load_object

PLACEHOLDER = "<image>"
PART_TYPES = ("text", "image", "video")
CHAT_KEYS = ("messages", "add_generation_prompt", "continue_final_message")
_SENTINEL = "VLORA-USER-TEXT"
# Python or JSON form of a part, which a template prints that takes only strings.
_PRINTED_PART = re.compile(r"""['"]type['"]""")


# Maximum number of special tokens in the texts of a prompt. Python is called for each, and no other
# request advances meanwhile. Written as text, each takes several tokens, so few contexts hold more.
MAX_STAND_INS = 32768


class StandIns:
    """Strings that stand for others while templates are applied. Clients cannot guess them."""

    def __init__(self) -> None:
        self._mark = secrets.token_hex(8)
        self._texts: list[tuple[str, bool]] = []

    def put(self, text: str, literal: bool) -> str:
        """Return a stand-in. literal: whether `text` is only text, whatever it spells.

        Raises InvalidArgument if there are too many.
        """
        if len(self._texts) == MAX_STAND_INS:
            raise InvalidArgument(f"the texts have more than {MAX_STAND_INS} special tokens")
        self._texts.append((text, literal))
        return f"{self._mark}{len(self._texts) - 1:06x}"

    def resolve(self, rendered: str, is_complete: bool = False) -> PromptText:
        """Return the prompt with the texts in place of their stand-ins."""
        parts: list[str] = []
        literals: list[tuple[int, int]] = []
        length = end = 0
        for match in re.finditer(f"{self._mark}([0-9a-f]{{6}})", rendered):
            before, (text, literal) = rendered[end : match.start()], self._texts[int(match[1], 16)]
            parts += (before, text)
            length += len(before) + len(text)
            if literal:
                literals.append((length - len(text), length))
            end = match.end()
        parts.append(rendered[end:])
        return PromptText("".join(parts), tuple(literals), is_complete)


@dataclass(frozen=True)
class Chat:
    """A conversation. Each message has a `role` and a `content`.

    A content is a string, in which `<image>` stands for an image, or a list of parts of the types
    `text`, `image` and `video` (one clip of all frames of the request). The text of a part never
    stands for anything else.

    add_generation_prompt: whether the prompt ends with the start of a new turn of the model.
    continue_final_message: whether the model continues the last message.
    """

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @classmethod
    def parse(cls, text: str) -> Chat:
        """Return the conversation in JSON. Raises InvalidArgument."""
        what = "the text of task 'chat'"
        given = load_object(text, what)
        for name in given:
            if name not in CHAT_KEYS:
                known = ", ".join(CHAT_KEYS)
                raise InvalidArgument(f"{what} has the unknown key {shown(name)}; known: {known}")
        messages = given.get("messages")
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
    def has_clip(self) -> bool:
        contents = (message["content"] for message in self.messages)
        lists = (content for content in contents if not isinstance(content, str))
        return any(part["type"] == "video" for content in lists for part in content)


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    return isinstance(content, str) or (isinstance(content, list) and all(map(_is_part, content)))


def _is_part(part: Any) -> bool:
    if not isinstance(part, dict) or part.get("type") not in PART_TYPES:
        return False
    return part["type"] != "text" or isinstance(part.get("text"), str)


# Renders messages: (messages, add_generation_prompt, continue_final_message) → text.
Apply = Callable[[Sequence[Mapping[str, Any]], bool, bool], str]


@dataclass(frozen=True)
class ChatTemplate:
    """Chat template of a checkpoint.

    prefix, suffix: text before and after the text of a single user turn. The suffix includes the
        start of the model's turn.
    image_text: text for one image in prompts of the checkpoint.
    clip_text: number of frames → text for a clip; None if its frames are separate images.
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
    clip_text: Callable[[int], str] | None = None
    apply: Apply | None = field(default=None, compare=False, repr=False)
    takes_parts: bool = field(default=False, compare=False)
    prints_images: bool = field(default=False, compare=False)
    video_text: str | None = field(default=None, compare=False)
    structure: re.Pattern[str] = field(default=re.compile(PLACEHOLDER), compare=False, repr=False)
    has_all_tokens: bool = field(default=False, compare=False)

    def wrap(self, text: str) -> str:
        """Return `text` as one user turn."""
        return f"{self.prefix}{text}{self.suffix}"

    def as_text(self, text: str, stand_ins: StandIns, keep: str = "") -> str:
        """Return a client's text with stand-ins for all structure in it but `keep`."""
        return self.structure.sub(
            lambda found: found[0] if found[0] == keep else stand_ins.put(found[0], literal=True),
            text,
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


def render_chat(chat: Chat, num_images: int, num_frames: int, template: ChatTemplate) -> PromptText:
    """Return the prompt of a conversation, with the checkpoint's text for each image and frame.

    A template that takes only strings gets the parts of a content joined by line breaks.

    Raises InvalidArgument if the conversation has not one place for each image and frame, and if
    the template refuses it.
    """
    stand_ins = StandIns()
    places = _Places(template, stand_ins, num_frames)
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
    check_places("messages have", places.count, num_images, num_frames, "")
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
    if template.clip_text is not None and template.video_text is not None:
        rendered = rendered.replace(template.video_text, template.clip_text(num_frames))
    rendered = with_images(rendered, num_frames if places.in_strings else 0, template)
    return stand_ins.resolve(rendered, template.has_all_tokens)


class _Places:
    """Converts contents to what a template takes, and counts their places for images and frames.

    in_strings: whether a string has placeholders.
    """

    def __init__(self, template: ChatTemplate, stand_ins: StandIns, num_frames: int) -> None:
        self._template = template
        self._stand_ins = stand_ins
        self._num_frames = num_frames
        self.count = 0
        self.in_strings = False
        self._has_clip = False

    def content(self, content: str | Sequence[Mapping[str, Any]]) -> Any:
        template = self._template
        if isinstance(content, str):
            if count := content.count(PLACEHOLDER):
                self.count += count
                self.in_strings = True
            text = template.as_text(content, self._stand_ins, keep=PLACEHOLDER)
            return [{"type": "text", "text": text}] if template.takes_parts else text
        parts = [one for part in content for one in self._parts(part)]
        if template.takes_parts:
            return parts
        return "\n".join(part["text"] for part in parts)

    def _parts(self, part: Mapping[str, Any]) -> list[dict[str, str]]:
        template = self._template
        if part["type"] == "text":
            return [_text(template.as_text(part["text"], self._stand_ins))]
        is_clip = part["type"] == "video"
        if self._has_clip:
            raise InvalidArgument("a conversation may have one clip, after all images")
        self._has_clip = is_clip
        self.count += self._num_frames if is_clip else 1
        if is_clip and template.clip_text is not None:
            if template.video_text is not None:
                return [{"type": "video"}]
            return [_text(self._stand_ins.put(template.clip_text(self._num_frames), False))]
        count = self._num_frames if is_clip else 1
        if template.prints_images:
            return [{"type": "image"}] * count
        return [_text(self._stand_ins.put(template.image_text, False))] * count


def join_parts(parts: Sequence[Mapping[str, str]], num_frames: int) -> str:
    """Return the texts of a content's parts, with placeholders unless all images come first."""
    are_texts = [part["type"] == "text" for part in parts]
    if sorted(are_texts) == are_texts:
        return "\n".join(part["text"] for part in parts if part["type"] == "text")
    places = {"image": PLACEHOLDER, "video": PLACEHOLDER * num_frames}
    return "".join(places.get(part["type"], part.get("text", "")) for part in parts)


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def with_images(prompt: str, num_frames: int, template: ChatTemplate) -> str:
    """Return the prompt with the checkpoint's text in place of the placeholders.

    num_frames: number of frames among the placeholders.

    Raises InvalidArgument if the frames are taken as one video but are not adjacent.
    """
    if template.clip_text is not None and num_frames:
        before, found, after = prompt.rpartition(PLACEHOLDER * num_frames)
        if not found or PLACEHOLDER in after:
            raise InvalidArgument(
                f"this model takes the {num_frames} frames as one video, so their {PLACEHOLDER}"
                " placeholders must follow each other, after those of all images; send single"
                " pictures as 'image'"
            )
        prompt = f"{before}{template.clip_text(num_frames)}{after}"
    return prompt.replace(PLACEHOLDER, template.image_text)


def check_places(what: str, count: int, images: int, frames: int, more: str) -> None:
    """Raise InvalidArgument if there is not one place for each image and frame."""
    if count != images + frames:
        raise InvalidArgument(
            f"the {what} {count} {PLACEHOLDER} placeholders but the request has"
            f" {images} images and {frames} frames; write one for each{more}"
        )
