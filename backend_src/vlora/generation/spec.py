"""The specification of a generation run: knowledge items, their required accuracy, and training."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from vlora.errors import InvalidArgument, nearest, shown
from vlora.strict_json import load_object
from vlora.strict_yaml import Float, Int, StrictModel, describe, read_yaml
from vlora.tasks import TASKS

TRAINED_TASKS = tuple(task for task, spec in TASKS.items() if spec.instruction is not None)
TRAINED_MODEL_TYPE = "llava"
# These tasks require the metric f1_iou50; other tasks must not use it.
BOX_TASKS = tuple(task for task, spec in TASKS.items() if spec.boxes)
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
Share = Annotated[Float, Field(ge=0, le=1)]
Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class OnnxTeacher(StrictModel):
    """An ONNX classifier: input [1, 3, size, size], output [1, labels].

    labels: answer for each class.
    size: side in pixels of the square to which images are scaled.
    mean, std: normalization of the three channels, whose values are from 0 to 1.
    """

    file: Path
    labels: tuple[str, ...]
    size: Annotated[Int, Field(ge=1, le=4096)]
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)


class Teacher(StrictModel):
    """A small model that labels images (§4.2.1, Fig. 9). Exactly one of its keys must be set.

    pipeline: arguments of a `transformers` pipeline, such as {"task": "image-classification",
        "model": "folder"}. The model must be a folder, because nothing is downloaded.
    python: "module:function". The function takes a PIL image and returns the text of the answer, or
        None if it cannot label the image.
    """

    pipeline: dict[str, Any] | None = None
    onnx: OnnxTeacher | None = None
    python: str | None = None

    @field_validator("python")
    @classmethod
    def _names_a_function(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[\w.]+:\w+", value):
            raise ValueError(f"'{value}' must have the form 'module:function'")
        return value

    @field_validator("pipeline")
    @classmethod
    def _names_a_model(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and not isinstance(value.get("model"), str):
            raise ValueError("needs the key 'model' with the folder of the model")
        return value

    @model_validator(mode="after")
    def _has_one_kind(self) -> Teacher:
        if sum(value is not None for value in (self.pipeline, self.onnx, self.python)) != 1:
            raise ValueError("give exactly one of pipeline, onnx and python")
        return self


class Item(StrictModel):
    """A knowledge item: a data set, with the accuracy that its application requires.

    images: folder of the images. If neither `conversations` nor `teacher` is given, the folder must
        have one subfolder of images per label.
    conversations: LLaVA conversations as JSON or JSONL about these images.
    teacher: model that labels the images.
    truth: JSON object with the right answer by image file, to measure the teacher.
    question: text of every request, for items without conversations.
    required: required accuracy from 0 to 1, called the item's promise.
    head: whether a vision task head answers (§4.2.2) instead of the LM head.
    max_examples: maximum number of examples, chosen by a hash; all if absent.
    """

    name: Name
    task: str
    images: Path
    conversations: Path | None = None
    teacher: Teacher | None = None
    truth: Path | None = None
    question: str = ""
    metric: Literal["top1", "vqa_score", "f1_iou50", "chrf"] = "top1"
    required: Annotated[Float, Field(gt=0, le=1)]
    head: bool = False
    max_examples: Annotated[Int, Field(ge=10)] | None = None

    @field_validator("task")
    @classmethod
    def _is_trained_task(cls, task: str) -> str:
        if task not in TRAINED_TASKS:
            known = f"the known tasks are {', '.join(TRAINED_TASKS)}"
            raise ValueError(f"unknown task '{task}'{nearest(task, TRAINED_TASKS) or '; ' + known}")
        return task

    @model_validator(mode="after")
    def _is_consistent(self) -> Item:
        if self.conversations and self.teacher:
            raise ValueError("give conversations or a teacher, not both")
        if self.truth and not self.teacher:
            raise ValueError("truth measures a teacher, and the item has none")
        if not self.conversations and TASKS[self.task].required_text and not self.question.strip():
            raise ValueError(f"task '{self.task}' needs a question")
        if self.head and self.metric != "top1":
            raise ValueError(
                f"a head answers with one label, so metric must be top1, not {self.metric}"
            )
        if self.task in BOX_TASKS and self.metric != "f1_iou50":
            raise ValueError(
                f"task '{self.task}' answers with boxes, so metric must be f1_iou50,"
                f" not {self.metric}"
            )
        if self.task not in BOX_TASKS and self.metric == "f1_iou50":
            raise ValueError(
                f"f1_iou50 compares boxes, and task '{self.task}' has none; metric must be top1,"
                " vqa_score or chrf"
            )
        return self


class Training(StrictModel):
    """Settings of one attempt to train an adapter.

    alpha: LoRA's alpha, twice the rank if absent.
    learning_rate: maximum learning rate.
    max_steps: maximum number of steps. An attempt ends earlier once all promises are kept.
    evaluate_every: number of steps between two evaluations on the validation split.
    patience: number of evaluations without a better score after which an attempt ends.
    restarts: number of times that an attempt which nearly keeps its promises continues from its
        best weights for another `max_steps` steps.
    margin: number of standard errors by which the validation accuracy must exceed a promise.
    mixed_precision: `auto` means bf16 if the device has instructions for it, and otherwise `no`.
    feature_cache_mib: memory in MiB for image features, which training does not change.
    """

    rank: Annotated[Int, Field(ge=1, le=256)] = 16
    alpha: Annotated[Float, Field(gt=0)] | None = None
    targets: Annotated[tuple[Target, ...], Field(min_length=1)] = (
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    )  # fmt: skip
    learning_rate: Annotated[Float, Field(gt=0, le=1)] = 1e-3
    batch_size: Annotated[Int, Field(ge=1)] = 32
    max_steps: Annotated[Int, Field(ge=1)] = 400
    evaluate_every: Annotated[Int, Field(ge=1)] = 50
    patience: Annotated[Int, Field(ge=1)] = 4
    restarts: Annotated[Int, Field(ge=0, le=10)] = 1
    margin: Annotated[Float, Field(ge=0, le=10)] = 1.0
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = "auto"
    feature_cache_mib: Annotated[Int, Field(ge=0)] = 2048


class PackingOptions(StrictModel):
    """Settings of the packing of items into adapters. The defaults go beyond the paper's heuristic.

    order: order of the items. `gradient` puts similar items next to each other. The paper's order
        is random.
    replay: share of a batch that is drawn from the items fused before. The paper has 0.
    focus: share of a batch that is drawn from the items below their goal, in proportion to what
        they lack. The paper has 0.
    fit: `last` tries only the newest adapter, as the paper does. `best` tries all, the most similar
        first.
    merge: method by which adapters are merged at the end, if all their items still reach their
        goals.
    merge_training: whether merged weights that break a promise are trained on the items of both
        adapters, unless an earlier attempt shows that the items are too different.
    """

    order: Literal["given", "random", "gradient"] = "gradient"
    replay: Share = 0.5
    focus: Share = 0.5
    fit: Literal["last", "best"] = "best"
    merge: Literal["none", "svd", "ties_svd", "dare_ties_svd"] = "svd"
    merge_training: bool = True


# The heuristic of the paper (§4.2.1).
PAPER = PackingOptions(
    order="random", replay=0.0, focus=0.0, fit="last", merge="none", merge_training=False
)


class Spec(StrictModel):
    """Specification of a generation run. Relative paths start at the folder of the YAML file.

    base: folder of the checkpoint.
    prefix: prefix of the adapters' names.
    split: shares of the examples for training, validation and test.
    """

    base: Path
    items: Annotated[tuple[Item, ...], Field(min_length=1)]
    prefix: Name = "packed"
    seed: Annotated[Int, Field(ge=0)] = 0
    split: tuple[Share, Share, Share] = (0.7, 0.15, 0.15)
    training: Training = Training()
    options: PackingOptions = PackingOptions()

    @model_validator(mode="after")
    def _is_consistent(self) -> Spec:
        names = [item.name for item in self.items]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two items are named '{min(twice)}'")
        if abs(sum(self.split) - 1) > 1e-6 or not all(self.split):
            raise ValueError("the shares of split must be positive and add up to 1")
        return self

    def item(self, name: str) -> Item:
        return next(item for item in self.items if item.name == name)


def read_spec(path: Path) -> Spec:
    """Return the specification in a YAML file, with absolute paths. Raises InvalidArgument."""
    loaded = read_yaml(path)
    try:
        spec = Spec.model_validate(loaded)
    except ValidationError as error:
        raise InvalidArgument(f"{path}: {describe(error)}") from None
    return _with_absolute_paths(spec, path.resolve().parent)


def _with_absolute_paths(spec: Spec, folder: Path) -> Spec:
    base = _existing(folder / spec.base, "base", is_folder=True)
    _check_base(base)
    items = []
    for item in spec.items:
        where = f"item '{item.name}'"
        images = _existing(folder / item.images, f"{where}: images", is_folder=True)
        paths: dict[str, Any] = {"images": images}
        for key in ("conversations", "truth"):
            if (path := getattr(item, key)) is not None:
                paths[key] = _existing(folder / path, f"{where}: {key}", is_folder=False)
        teacher = item.teacher
        if teacher and (onnx := teacher.onnx):
            file = _existing(folder / onnx.file, f"{where}: teacher.onnx.file", is_folder=False)
            onnx = onnx.model_copy(update={"file": file})
            paths["teacher"] = teacher.model_copy(update={"onnx": onnx})
        if teacher and (pipeline := teacher.pipeline):
            model = folder / pipeline["model"]
            model = _existing(model, f"{where}: teacher.pipeline.model", is_folder=True)
            pipeline = {**pipeline, "model": str(model)}
            paths["teacher"] = teacher.model_copy(update={"pipeline": pipeline})
        items.append(item.model_copy(update=paths))
    return spec.model_copy(update={"base": base, "items": tuple(items)})


def _existing(path: Path, what: str, *, is_folder: bool) -> Path:
    try:
        if path.is_dir() if is_folder else path.is_file():
            return path
        exists = path.exists()
    except (OSError, ValueError) as error:  # A name that is too long, or with a null character.
        reason = getattr(error, "strerror", None) or error
        raise InvalidArgument(f"{what}: {shown(str(path))} is not a valid path: {reason}") from None
    kind = "a folder" if is_folder else "a file"
    raise InvalidArgument(f"{what}: {path} {f'is not {kind}' if exists else 'does not exist'}")


def _check_base(base: Path) -> None:
    config = base / "config.json"
    if not config.is_file():
        raise InvalidArgument(f"base: {base} is not a checkpoint: it has no config.json")
    try:
        text = config.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"base: {config} cannot be read: {error}") from error
    model_type = load_object(text, str(config)).get("model_type")
    if model_type != TRAINED_MODEL_TYPE:
        raise InvalidArgument(
            f"base: {config} has the model_type {shown(model_type)}; adapters are generated only"
            f" for {TRAINED_MODEL_TYPE!r}"
        )
