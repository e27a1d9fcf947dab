"""The tasks, with the templates in appendix C of the V-LoRA paper (Fig. 25)."""

from dataclasses import dataclass

CHAT_TASK = "chat"
RAW_TASK = "raw"
# Name that stands for the adapter's own task, else for the default one. The caller of `render` must
# replace it by that task.
AUTO_TASK = "auto"


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
    RAW_TASK: TaskSpec(
        16, None, "Continue a prompt", "Prompt, without a template", required_text="the prompt"
    ),
    # The text is a conversation in JSON, which the checkpoint's chat template renders.
    CHAT_TASK: TaskSpec(None, None, "Answer a message", "Message", "Describe the picture."),
}
