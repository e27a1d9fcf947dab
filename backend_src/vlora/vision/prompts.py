"""Task prompts: the templates in appendix C of the V-LoRA paper (Fig. 25), inside a chat template.

Training and serving both use this module. A prompt has one `<image>` placeholder per image or
frame, which the engine later expands into image tokens. By default, all placeholders stand before
the text, those of images before those of frames. A text that contains `<image>` determines the
positions itself, and must have exactly one placeholder for each image or frame.
"""

from vlora.errors import InvalidArgument
from vlora.request import PromptText
from vlora.tasks import AUTO_TASK, CHAT_TASK, TASKS
from vlora.vision.chat_template import (
    PLACEHOLDER,
    Chat,
    ChatTemplate,
    StandIns,
    check_places,
    join_parts,
    render_chat,
    with_images,
)


def render(
    task: str, text: str | Chat, num_images: int, num_frames: int, template: ChatTemplate
) -> PromptText:
    """Return the prompt of one request, with the checkpoint's text for each image and frame.

    text: text of the request; JSON of a conversation for the task `chat`. A conversation of one
        user message can ask for any task but `raw`. Special tokens in either are only text, except
        for the task `raw`.

    Raises InvalidArgument for an unknown task, for a missing text, and if the text has placeholders
    but not one for each image and frame.
    """
    chat = Chat.parse(text) if task == CHAT_TASK and isinstance(text, str) else text
    if isinstance(chat, Chat) and chat.has_clip and not num_frames:
        raise InvalidArgument(
            "the messages have a part of type 'video', but the request has no frames; send them as"
            " 'frames', or leave the part out"
        )
    if task == CHAT_TASK and isinstance(chat, Chat):
        return render_chat(chat, num_images, num_frames, template)
    if task not in TASKS:
        known = ", ".join((*TASKS, AUTO_TASK))
        raise InvalidArgument(f"unknown task '{task}'; known tasks are {known}")
    spec = TASKS[task]
    stand_ins = StandIns()
    if isinstance(text, Chat):
        text = _only_text(text, task, num_frames, template, stand_ins)
    elif spec.instruction is not None:
        text = template.as_text(text, stand_ins, keep=PLACEHOLDER)
    if spec.required_text is not None and _is_blank(text):
        raise InvalidArgument(
            f"the prompt is empty: task '{task}' needs {spec.required_text} as text"
        )
    if count := text.count(PLACEHOLDER):
        check_places("text has", count, num_images, num_frames, ", or none")
    images = "" if PLACEHOLDER in text else PLACEHOLDER * (num_images + num_frames)
    if spec.instruction is None:
        prompt = images + text
    else:
        prompt = template.wrap(task_text(task, text.strip(), images))
    return stand_ins.resolve(with_images(prompt, num_frames, template))


def _only_text(
    chat: Chat, task: str, num_frames: int, template: ChatTemplate, stand_ins: StandIns
) -> str:
    """Return the text of the only message, with placeholders unless all images come first."""
    message = chat.messages[0]
    if len(chat.messages) > 1 or message["role"] != "user" or TASKS[task].instruction is None:
        raise InvalidArgument(
            f"task '{task}' takes the text of one user message, not a conversation"
        )
    content = message["content"]
    if isinstance(content, str):
        return template.as_text(content, stand_ins, keep=PLACEHOLDER)
    parts = [
        {**part, "text": template.as_text(part.get("text", ""), stand_ins)} for part in content
    ]
    return join_parts(parts, num_frames)


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
