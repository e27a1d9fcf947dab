"""Task prompts: the templates in appendix C of the V-LoRA paper (Fig. 25), inside a chat template.

Training and serving both use this module. A prompt has one `<image>` placeholder per image or
frame, which the engine later expands into image tokens. By default, all placeholders stand before
the text, those of images before those of frames. A text that contains `<image>` determines the
positions itself, and must have exactly one placeholder for each image or frame.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from vlora.errors import InvalidArgument
from vlora.strict_json import load_object

PLACEHOLDER = "<image>"
CHAT_TASK = "chat"
# Name that stands for the adapter's task if the adapter has exactly one, else for the ensembles'
# default task. The caller of `render` must replace it by that task.
AUTO_TASK = "auto"
Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class TaskSpec:
    """One task: its prompt template, its default token limit, and its texts in the playground.

    max_tokens: default of `max_tokens` for requests through an ensemble; None if only the context
        is the limit.
    instruction: text after the images. `{text}` in it stands for the request's text. If the
        instruction has no `{text}`, a request with a text uses its text instead of the instruction.
        None: the request's text is the whole prompt, without the chat template.
    title: what the task does.
    label, hint: description of the request's text, and an example of it or "".
    required_text: the same in a message that says what is missing; None if the text is optional.
    separator: text between the images and the instruction.
    boxes: whether answers are boxes.
    """

    max_tokens: int | None
    instruction: str | None
    title: str
    label: str = "Instruction (optional)"
    hint: str = ""
    required_text: str | None = None
    separator: str = ", "
    boxes: bool = False


TASKS: dict[str, TaskSpec] = {
    "vqa": TaskSpec(
        16,
        "{text}",
        "Answer a question",
        "Question",
        "What color is the star?",
        required_text="the question",
    ),
    "caption": TaskSpec(48, "Generate the caption in English:", "Describe the picture"),
    "refer": TaskSpec(
        32,
        "Circle the {text} on the picture.",
        "Find one thing",
        "Thing to find",
        "red circle",
        required_text="the thing to circle",
        boxes=True,
    ),
    "detect": TaskSpec(
        64,
        "Please box all the objects in the picture that you think are {text}.",
        "Find all of a kind",
        "Things to find",
        "circle",
        required_text="the things to box",
        boxes=True,
    ),
    "classify": TaskSpec(8, "What is the category of the picture?", "Name the category"),
    "video": TaskSpec(
        16,
        "Please analyze the consecutive frames sequence and identify the actions occurring "
        "in the video.",
        "Name the action",
        separator=" ",
    ),
    "raw": TaskSpec(
        16, None, "Continue a prompt", "Prompt, without a template", required_text="the prompt"
    ),
    # The text is a conversation, `{"messages": [{"role", "content"}]}`, which the checkpoint's chat
    # template renders.
    CHAT_TASK: TaskSpec(None, None, "Continue a conversation", "Messages as JSON"),
}

_SENTINEL = "VLORA-USER-TEXT"


@dataclass(frozen=True)
class ChatTemplate:
    """Chat template of a checkpoint, reduced to the text before and after one user turn.

    suffix: includes the start of the model's turn.
    image_text: text for one image in prompts of the checkpoint.
    clip_text: number of frames → text for a clip; None if its frames are separate images.
    apply: renders several messages; None if the checkpoint has no chat template.
    """

    prefix: str
    suffix: str
    image_text: str = PLACEHOLDER
    clip_text: Callable[[int], str] | None = None
    apply: Callable[[Messages], str] | None = field(default=None, compare=False, repr=False)

    def wrap(self, text: str) -> str:
        """Return `text` as one user turn."""
        return f"{self.prefix}{text}{self.suffix}"

    @classmethod
    def from_checkpoint(cls, folder: str | Path) -> "ChatTemplate":
        """Return the template of a checkpoint: one rendered user turn, split around its text.

        Without a chat template, the prefix is the begin-of-text token, if there is one.

        Raises InvalidArgument for a template that fails or whose result does not contain the text
        exactly once.
        """
        # The import is here because some processes need only the tasks.
        from vlora.model.tokenizer import load_tokenizer

        images = _image_texts(Path(folder))
        tokenizer: Any = load_tokenizer(Path(folder))
        template = tokenizer.chat_template or _processor_template(Path(folder))
        if template is None:
            return cls(prefix=tokenizer.bos_token or "", suffix="", **images)
        problem = "does not contain the user's text exactly once"
        given = None if tokenizer.chat_template else template
        for in_parts in (False, True):
            apply = partial(_apply, tokenizer, given, in_parts)
            try:
                rendered = apply([{"role": "user", "content": _SENTINEL}])
            except Exception as error:  # A template is a program and can fail in any way.
                problem = f"fails: {error}"
                continue
            if rendered.count(_SENTINEL) == 1:
                prefix, suffix = rendered.split(_SENTINEL)
                return cls(prefix=prefix, suffix=suffix, apply=apply, **images)
        raise InvalidArgument(f"the chat template of {folder} {problem}")


def _apply(tokenizer: Any, template: str | None, in_parts: bool, messages: Messages) -> str:
    """Render messages with a chat template, or with the tokenizer's own if it is None.

    in_parts: whether the template takes a message's content as a list of parts.
    """
    conversation = [
        {"role": message["role"], "content": [{"type": "text", "text": message["content"]}]}
        if in_parts
        else {"role": message["role"], "content": message["content"]}
        for message in messages
    ]
    rendered: str = tokenizer.apply_chat_template(
        conversation, chat_template=template, add_generation_prompt=True, tokenize=False
    )
    return rendered


def render(task: str, text: str, num_images: int, num_frames: int, template: ChatTemplate) -> str:
    """Return the prompt of one request, with the checkpoint's text for each image and frame.

    Raises InvalidArgument for an unknown task, for a missing text, and if the text has placeholders
    but not one for each image and frame.
    """
    if task == CHAT_TASK:
        return _render_chat(text, num_images, num_frames, template)
    if task not in TASKS:
        known = ", ".join((*TASKS, AUTO_TASK))
        raise InvalidArgument(f"unknown task '{task}'; known tasks are {known}")
    spec = TASKS[task]
    if spec.required_text is not None and _is_blank(text):
        raise InvalidArgument(
            f"the prompt is empty: task '{task}' needs {spec.required_text} as text"
        )
    if count := text.count(PLACEHOLDER):
        _check_placeholders("text has", count, num_images, num_frames, ", or none")
    images = "" if PLACEHOLDER in text else PLACEHOLDER * (num_images + num_frames)
    if spec.instruction is None:
        prompt = images + text
    else:
        prompt = template.wrap(task_text(task, text.strip(), images))
    return _with_images(prompt, num_frames, template)


def _with_images(prompt: str, num_frames: int, template: ChatTemplate) -> str:
    """Return the prompt with the checkpoint's text in place of the placeholders.

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


def _render_chat(text: str, num_images: int, num_frames: int, template: ChatTemplate) -> str:
    messages = load_object(text, "the text of task 'chat'").get("messages")
    if not isinstance(messages, list) or not all(map(_is_message, messages)) or not messages:
        raise InvalidArgument(
            "the text of task 'chat' must be an object whose 'messages' is a list of objects with"
            " the strings 'role' and 'content'"
        )
    if template.apply is None:
        raise InvalidArgument(
            "the checkpoint has no chat template, so a chat must have one message only"
        )
    count = sum(message["content"].count(PLACEHOLDER) for message in messages)
    _check_placeholders("messages have", count, num_images, num_frames, "")
    try:
        rendered = template.apply(messages)
    except Exception as error:  # A template is a program and can fail in any way.
        raise InvalidArgument(
            f"the checkpoint's chat template refuses the messages: {error}"
        ) from error
    return _with_images(rendered, num_frames, template)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(
        isinstance(message.get(key), str) for key in ("role", "content")
    )


def task_text(task: str, text: str, images: str) -> str:
    """Return the text of the user's turn, such as `<image>, What color is the star? Answer:`.

    task: any task but `raw` and `chat`.
    text: text of the request.
    images: placeholders to put before the text.
    """
    spec = TASKS[task]
    instruction = spec.instruction or ""
    if "{text}" in instruction:
        instruction = instruction.replace("{text}", text)
    elif _is_blank(text):
        images += text.replace(" ", "")
    else:
        instruction = text
    separator = spec.separator if images else ""
    return f"{images}{separator}{instruction} Answer:"


def _is_blank(text: str) -> bool:
    return not text.replace(PLACEHOLDER, "").strip()


def _check_placeholders(what: str, count: int, images: int, frames: int, more: str) -> None:
    if count != images + frames:
        raise InvalidArgument(
            f"the {what} {count} {PLACEHOLDER} placeholders but the request has"
            f" {images} images and {frames} frames; write one for each{more}"
        )


def _image_texts(folder: Path) -> dict[str, Any]:
    from vlora.vision.families.base import vision_family

    file = folder / "config.json"
    config = json.loads(file.read_bytes()) if file.is_file() else {}
    family = vision_family(config.get("model_type", ""))
    if family is None:
        return {}
    return {"image_text": family.image_text, "clip_text": family.clip_text}


def _processor_template(folder: Path) -> str | None:
    """Return the template in `chat_template.json`, which processors of transformers 4 write."""
    file = folder / "chat_template.json"
    if not file.is_file():
        return None
    try:
        template = json.loads(file.read_bytes())["chat_template"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidArgument(f"{file} cannot be read: {error!r}") from error
    return str(template)
