"""Task prompts: the templates of the V-LoRA paper's appendix C (Fig. 25) inside a chat template.

Training and serving both import this module, so each prompt is defined once. It handles text only,
no tokens, tensors or image sizes. A prompt holds one `<image>` placeholder per image or frame; the
engine later expands each into the vision tower's image tokens.

By default images stand before the text, independent images before frames. A text that contains
`<image>` positions the images itself and must then have exactly one placeholder for each.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlora.errors import InvalidArgument

PLACEHOLDER = "<image>"


@dataclass(frozen=True)
class TaskSpec:
    """Prompt template and default token limit of one task.

    max_tokens: default of `max_tokens` for requests through an ensemble.
    instruction: what follows the images, with `{text}` for the request's text. Without `{text}`, a
        text in the request replaces the instruction. None sends the text verbatim, without the chat
        template.
    required_text: what the request's text means, if the task needs one; None if it is optional.
    separator: what stands between the images and the instruction.
    """

    max_tokens: int
    instruction: str | None
    required_text: str | None = None
    separator: str = ", "


TASKS: dict[str, TaskSpec] = {
    "vqa": TaskSpec(16, "{text}", required_text="the question"),
    "caption": TaskSpec(48, "Generate the caption in English:"),
    "refer": TaskSpec(32, "Circle the {text} on the picture.", required_text="the thing to circle"),
    "detect": TaskSpec(
        64,
        "Please box all the objects in the picture that you think are {text}.",
        required_text="the things to box",
    ),
    "classify": TaskSpec(8, "What is the category of the picture?"),
    "video": TaskSpec(
        16,
        "Please analyze the consecutive frames sequence and identify the actions occurring "
        "in the video.",
        separator=" ",
    ),
    "raw": TaskSpec(16, None, required_text="the prompt"),
}

_SENTINEL = "VLORA-USER-TEXT"


@dataclass(frozen=True)
class ChatTemplate:
    """Text that a checkpoint's chat template puts around one user turn.

    suffix: includes the generation prompt.
    """

    prefix: str
    suffix: str

    def wrap(self, text: str) -> str:
        """Return `text` as one user turn."""
        return f"{self.prefix}{text}{self.suffix}"

    @classmethod
    def from_checkpoint(cls, folder: str | Path) -> "ChatTemplate":
        """Render one user turn with the checkpoint's chat template and split it around the text.

        A checkpoint without a chat template gets its begin-of-text token as prefix, if it has one,
        and no suffix. Raises InvalidArgument for a template that fails or does not contain the text
        exactly once.
        """
        # Imported here because some processes need only the tasks.
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        template = tokenizer.chat_template or _processor_template(Path(folder))
        if template is None:
            return cls(prefix=tokenizer.bos_token or "", suffix="")
        problem = "does not repeat the user's text once"
        for content in (_SENTINEL, [{"type": "text", "text": _SENTINEL}]):
            try:
                rendered = tokenizer.apply_chat_template(
                    [{"role": "user", "content": content}],
                    chat_template=None if tokenizer.chat_template else template,
                    add_generation_prompt=True,
                    tokenize=False,
                )
            except Exception as error:  # a template is a program and can fail in any way
                problem = f"fails: {error}"
                continue
            if rendered.count(_SENTINEL) == 1:
                prefix, suffix = rendered.split(_SENTINEL)
                return cls(prefix=prefix, suffix=suffix)
        raise InvalidArgument(f"the chat template of {folder} {problem}")


def render(task: str, text: str, num_images: int, num_frames: int, template: ChatTemplate) -> str:
    """Return the prompt of one request, with one `<image>` per image and frame.

    Raises InvalidArgument for an unknown task, a missing text, and a text whose placeholders do not
    match its images.
    """
    if task not in TASKS:
        raise InvalidArgument(f"unknown task '{task}'; known tasks are {', '.join(TASKS)}")
    spec = TASKS[task]
    if spec.required_text is not None and _is_blank(text):
        raise InvalidArgument(
            f"the prompt is empty: task '{task}' needs {spec.required_text} as text"
        )
    _check_placeholders(text, num_images, num_frames)
    images = "" if PLACEHOLDER in text else PLACEHOLDER * (num_images + num_frames)
    if spec.instruction is None:
        return images + text
    return template.wrap(_user_turn(spec, spec.instruction, text.strip(), images))


def task_text(task: str, text: str, images: str) -> str:
    """Return the text of the user's turn, e.g. `<image>, What color is the star? Answer:`.

    task: any task but one that sends the text verbatim. images: placeholders before the text.
    """
    spec = TASKS[task]
    return _user_turn(spec, spec.instruction or "", text, images)


def _user_turn(spec: TaskSpec, instruction: str, text: str, images: str) -> str:
    if "{text}" in instruction:
        instruction = instruction.replace("{text}", text)
    elif _is_blank(text):
        images += text.replace(" ", "")
    else:
        instruction = text
    separator = spec.separator if images else ""
    return f"{images}{separator}{instruction} Answer:"


def _is_blank(text: str) -> bool:
    """Return whether a text holds nothing but placeholders and white space."""
    return not text.replace(PLACEHOLDER, "").strip()


def _check_placeholders(text: str, num_images: int, num_frames: int) -> None:
    count = len(re.findall(re.escape(PLACEHOLDER), text))
    if count and count != num_images + num_frames:
        raise InvalidArgument(
            f"the text has {count} {PLACEHOLDER} placeholders but the request has"
            f" {num_images} images and {num_frames} frames; write one for each, or none"
        )


def _processor_template(folder: Path) -> str | None:
    """Return the chat template in the file of transformers 4's processors, None without the file.

    Tokenizers do not read this file.
    """
    file = folder / "chat_template.json"
    if not file.is_file():
        return None
    try:
        template = json.loads(file.read_bytes())["chat_template"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidArgument(f"{file} cannot be read: {error!r}") from error
    return str(template)
