"""Task prompts: the templates of the V-LoRA paper's appendix C (Fig. 25) inside a chat template.

Training and serving both import this module, so a prompt is spelt in one place. Pure text: it
knows no tokens, no tensors and no image sizes. A prompt holds one `<image>` placeholder per
image or frame; the engine later expands each into the tower's image tokens.

Who decides where images stand: by default they come first, images before frames. A text that
contains `<image>` places them itself and must then have exactly one for each image and frame.

The words of a task:

- `vqa`, `refer`, `detect` need a text: the question, the thing to circle, the things to box.
- `caption`, `classify`, `video` bring their own instruction; a text given with them *replaces*
  that instruction (it is a more specific one), and the rest of the template stays.
- `raw` is the text verbatim, without the chat template; images still stand before it.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlora.errors import InvalidArgument

PLACEHOLDER = "<image>"

TASKS: tuple[str, ...] = ("vqa", "caption", "refer", "detect", "classify", "video", "raw")

TASK_DEFAULT_MAX_TOKENS: dict[str, int] = {
    "vqa": 16,
    "caption": 48,
    "refer": 32,
    "detect": 64,
    "classify": 8,
    "video": 16,
    "raw": 16,
}

_NEEDS_TEXT: dict[str, str] = {
    "vqa": "{text}",
    "refer": "Circle the {text} on the picture.",
    "detect": "Please box all the objects in the picture that you think are {text}.",
}
_OWN_INSTRUCTION: dict[str, str] = {
    "caption": "Generate the caption in English:",
    "classify": "What is the category of the picture?",
    "video": (
        "Please analyze the consecutive frames sequence and identify the actions occurring "
        "in the video."
    ),
}
_TEXT_MEANS: dict[str, str] = {
    "vqa": "the question",
    "refer": "the thing to circle",
    "detect": "the things to box",
    "raw": "the prompt",
}
_SENTINEL = "VLORA-USER-TEXT"


@dataclass(frozen=True)
class ChatTemplate:
    """What a checkpoint's chat template puts round one user turn, generation prompt included."""

    prefix: str
    suffix: str

    def wrap(self, text: str) -> str:
        return f"{self.prefix}{text}{self.suffix}"

    @classmethod
    def from_checkpoint(cls, folder: str | Path) -> "ChatTemplate":
        """What the tokenizer's own call makes of one user turn, with a marker for its text.

        A checkpoint without a chat template gets its bos token before the text and nothing after.
        Raises InvalidArgument for a template that fails, or leaves the text out.
        """
        from transformers import AutoTokenizer  # not for the processes that only need the tasks

        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        template = tokenizer.chat_template or _template_of_the_processor(Path(folder))
        if template is None:
            return cls(prefix=tokenizer.bos_token or "", suffix="")
        why = "does not repeat the user's text once"
        for content in (_SENTINEL, [{"type": "text", "text": _SENTINEL}]):
            try:
                rendered = tokenizer.apply_chat_template(
                    [{"role": "user", "content": content}],
                    chat_template=None if tokenizer.chat_template else template,
                    add_generation_prompt=True,
                    tokenize=False,
                )
            except Exception as error:  # a template is a program of the checkpoint's author
                why = f"fails: {error}"
                continue
            if rendered.count(_SENTINEL) == 1:
                prefix, suffix = rendered.split(_SENTINEL)
                return cls(prefix=prefix, suffix=suffix)
        raise InvalidArgument(f"the chat template of {folder} {why}")


def render(task: str, text: str, num_images: int, num_frames: int, template: ChatTemplate) -> str:
    """Return the prompt of one request, with one `<image>` per image and frame.

    Raises InvalidArgument for an unknown task, an empty prompt, and a text whose placeholders do
    not match its images.
    """
    if task not in TASKS:
        raise InvalidArgument(f"unknown task '{task}'; known tasks are {', '.join(TASKS)}")
    if task in _TEXT_MEANS and not text.replace(PLACEHOLDER, "").strip():
        raise InvalidArgument(
            f"the prompt is empty: task '{task}' needs {_TEXT_MEANS[task]} as text"
        )
    _check_placeholders(text, num_images, num_frames)
    images = "" if PLACEHOLDER in text else PLACEHOLDER * (num_images + num_frames)
    if task == "raw":
        return images + text
    return template.wrap(task_text(task, text.strip(), images))


def task_text(task: str, text: str, images: str) -> str:
    """Return what the user's turn says, e.g. `<image>, What color is the star? Answer:`."""
    if task in _NEEDS_TEXT:
        instruction = _NEEDS_TEXT[task].replace("{text}", text)
    elif not text.replace(PLACEHOLDER, "").strip():
        images, instruction = images + text.replace(" ", ""), _OWN_INSTRUCTION[task]
    else:
        instruction = text
    separator = "" if not images else " " if task == "video" else ", "
    return f"{images}{separator}{instruction} Answer:"


def _check_placeholders(text: str, num_images: int, num_frames: int) -> None:
    written = len(re.findall(re.escape(PLACEHOLDER), text))
    if written and written != num_images + num_frames:
        raise InvalidArgument(
            f"the text has {written} {PLACEHOLDER} placeholders but the request brings "
            f"{num_images} images and {num_frames} frames; write one for each, or none"
        )


def _template_of_the_processor(folder: Path) -> str | None:
    """The template where processors of transformers 4 keep it, which tokenizers do not read."""
    file = folder / "chat_template.json"
    if not file.is_file():
        return None
    try:
        template = json.loads(file.read_bytes())["chat_template"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidArgument(f"{file} cannot be read: {error!r}") from error
    return str(template)
