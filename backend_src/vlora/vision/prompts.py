"""Task prompts: the templates in appendix C of the V-LoRA paper (Fig. 25), inside a chat template.

Training and serving both use this module. A prompt has one `<image>` placeholder per image or
frame, and one `<video>` per video file, which the engine later expands into image tokens. By
default, all placeholders stand before the text: images, video files, frames. A text that contains
placeholders determines the positions itself, and must have all of them.
"""

import math
from collections.abc import Sequence

from vlora.errors import InvalidArgument
from vlora.request import Clip, PromptText
from vlora.tasks import AUTO_TASK, CHAT_TASK, TASKS
from vlora.vision.chat_template import (
    CLIP_PLACEHOLDER,
    PLACEHOLDER,
    Chat,
    ChatTemplate,
    Media,
    StandIns,
    join_parts,
    render_chat,
)


def render(
    task: str,
    text: str | Chat,
    num_images: int,
    num_frames: int,
    template: ChatTemplate,
    videos: Sequence[Clip] = (),
    context: float = math.inf,
) -> PromptText:
    """Return the prompt of one request, with the checkpoint's text for each image and clip.

    text: text of the request; JSON of a conversation for the task `chat`. A conversation of one
        user message can ask for any task but `raw`. Special tokens in either are only text, except
        for the task `raw`.
    num_frames: number of frames that belong to no video file.
    context: tokens of the context, which bounds the messages of a conversation in JSON.

    Raises InvalidArgument for an unknown task, for a missing text, and if the text has placeholders
    but not one for each image and clip.
    """
    chat = Chat.parse(text, context) if task == CHAT_TASK and isinstance(text, str) else text
    if isinstance(chat, Chat) and chat.clips and not num_frames and not videos:
        raise InvalidArgument(
            "the messages have a part of type 'video', but the request has no frames; send them as"
            " 'frames', or leave the part out"
        )
    if task == CHAT_TASK and isinstance(chat, Chat):
        return render_chat(chat, num_images, num_frames, template, videos)
    if task not in TASKS:
        known = ", ".join((*TASKS, AUTO_TASK))
        raise InvalidArgument(f"unknown task '{task}'; known tasks are {known}")
    spec = TASKS[task]
    stand_ins = StandIns()
    media = Media(num_images, num_frames, videos, template, stand_ins)
    if isinstance(text, Chat):
        text = _only_text(text, task, media, template, stand_ins)
    elif spec.instruction is not None:
        text = template.as_text(text, stand_ins, keep=media.placeholders)
    if spec.required_text is not None and _is_blank(text):
        raise InvalidArgument(
            f"the prompt is empty: task '{task}' needs {spec.required_text} as text"
        )
    images = PLACEHOLDER * num_images + CLIP_PLACEHOLDER * len(videos) + PLACEHOLDER * num_frames
    if any(mark in text for mark in media.placeholders):
        clips = text.count(CLIP_PLACEHOLDER) if videos else 0
        media.check("text has", text.count(PLACEHOLDER), clips, ", or none")
        images = ""
    if spec.instruction is None:
        prompt = images + text
    else:
        prompt = template.wrap(task_text(task, text.strip(), images))
    return stand_ins.resolve(media.place(prompt))


def _only_text(
    chat: Chat, task: str, media: Media, template: ChatTemplate, stand_ins: StandIns
) -> str:
    """Return the text of the only message, with placeholders unless all images come first."""
    message = chat.messages[0]
    if len(chat.messages) > 1 or message["role"] != "user" or TASKS[task].instruction is None:
        raise InvalidArgument(
            f"task '{task}' takes the text of one user message, not a conversation"
        )
    content = message["content"]
    if isinstance(content, str):
        return template.as_text(content, stand_ins, keep=media.placeholders)
    parts = [
        {**part, "text": template.as_text(part.get("text", ""), stand_ins)} for part in content
    ]
    return join_parts(parts, media.videos, PLACEHOLDER * media.frames)


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
    return not text.replace(PLACEHOLDER, "").replace(CLIP_PLACEHOLDER, "").strip()
