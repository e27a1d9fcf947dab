"""The specification of a generation run: knowledge items, their required accuracy, and training.

`read_spec` reads a YAML file and checks it strictly. For an unknown key, a wrong type or a missing
file, the error names the position in the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from vlora.errors import InvalidArgument
from vlora.vision.prompts import TASKS

MAX_SPEC_BYTES = 1 << 20
TRAINED_TASKS = tuple(task for task, spec in TASKS.items() if spec.instruction is not None)
METRICS = ("top1", "vqa_score", "f1_iou50", "chrf")

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
Share = Annotated[float, Field(ge=0, le=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OnnxTeacher(_Strict):
    """An ONNX classifier: input [1, 3, size, size], output [1, labels].

    file: the ONNX file.
    labels: answer for each class.
    size: height and width in pixels to which images are scaled.
    mean, std: normalization of the three channels, whose values are from 0 to 1.
    """

    file: Path
    labels: tuple[str, ...]
    size: Annotated[int, Field(ge=1, le=4096)]
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)


class Teacher(_Strict):
    """A small model that labels images (§4.2.1, Fig. 9). Exactly one of its keys must be set.

    pipeline: arguments of a `transformers` pipeline, such as {"task": "image-classification",
        "model": "folder"}.
    onnx: a classifier as an ONNX file, with its labels and its preprocessing.
    python: "module:function". The function takes a PIL image and returns the text of the answer, or
        None if it cannot label the image.
    """

    pipeline: dict[str, Any] | None = None
    onnx: OnnxTeacher | None = None
    python: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] | None = None

    @model_validator(mode="after")
    def _has_one_kind(self) -> Teacher:
        if sum(value is not None for value in (self.pipeline, self.onnx, self.python)) != 1:
            raise ValueError("give exactly one of pipeline, onnx and python")
        return self


class Item(_Strict):
    """A knowledge item: a data set, with the accuracy that its application requires.

    name: name of the item.
    task: task of its requests.
    images: folder of the images. Without `conversations` and `teacher`, it has one folder of images
        per label.
    conversations: LLaVA conversations as JSON or JSONL about these images.
    teacher: model that labels the images.
    truth: JSON object with the right answer by image file, to measure the teacher.
    question: text of every request, for items without conversations.
    metric: metric of the accuracy.
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
    required: Annotated[float, Field(gt=0, le=1)]
    head: bool = False
    max_examples: Annotated[int, Field(ge=10)] | None = None

    @field_validator("task")
    @classmethod
    def _is_trained_task(cls, task: str) -> str:
        if task not in TRAINED_TASKS:
            raise ValueError(f"unknown task '{task}'; known tasks are {', '.join(TRAINED_TASKS)}")
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
            raise ValueError("a head answers with one label; its metric is top1")
        return self


class Training(_Strict):
    """Settings of one attempt to train an adapter.

    rank, alpha: LoRA's rank and alpha; alpha is twice the rank if absent.
    targets: names of the matrices to adapt in every layer.
    learning_rate: maximum learning rate.
    batch_size: number of examples per step.
    max_steps: maximum number of steps. An attempt ends earlier once all promises are kept.
    evaluate_every: number of steps between two evaluations on the validation split.
    patience: number of evaluations without a better score after which an attempt ends.
    restarts: number of times that an attempt which nearly keeps its promises continues from its
        best weights for another `max_steps` steps.
    margin: number of standard errors by which the validation accuracy must exceed a promise,
        because the accuracy on the test split will differ.
    mixed_precision: `auto` means bf16 if the device has instructions for it, and otherwise `no`.
    feature_cache_mib: memory in MiB for image features, which training does not change.
    """

    rank: Annotated[int, Field(ge=1, le=256)] = 16
    alpha: Annotated[float, Field(gt=0)] | None = None
    targets: tuple[str, ...] = (
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    )  # fmt: skip
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 1e-3
    batch_size: Annotated[int, Field(ge=1)] = 32
    max_steps: Annotated[int, Field(ge=1)] = 400
    evaluate_every: Annotated[int, Field(ge=1)] = 50
    patience: Annotated[int, Field(ge=1)] = 4
    restarts: Annotated[int, Field(ge=0, le=10)] = 1
    margin: Annotated[float, Field(ge=0, le=10)] = 1.0
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = "auto"
    feature_cache_mib: Annotated[int, Field(ge=0)] = 2048


class PackingOptions(_Strict):
    """Settings of the packing of items into adapters. The defaults go beyond the paper's heuristic.

    order: order of the items. `gradient` puts similar items next to each other. The paper's order
        is random.
    replay: share of a batch that is drawn from the items fused before. The paper has 0.
    focus: share of a batch that is drawn from the items below their goal, in proportion to the
        accuracy that they still lack. The paper has 0.
    fit: `last` tries only the newest adapter, as the paper does. `best` tries every adapter, the
        most similar first.
    merge: method by which adapters are merged at the end. Two adapters are merged only if all their
        items still reach their goals.
    merge_training: whether merged weights that break a promise are trained on the items of both
        adapters, unless an earlier attempt shows that these are too different.
    """

    order: Literal["given", "random", "gradient"] = "gradient"
    replay: Share = 0.5
    focus: Share = 0.5
    fit: Literal["last", "best"] = "best"
    merge: Literal["none", "svd", "ties_svd", "dare_ties_svd"] = "svd"
    merge_training: bool = True


PAPER = PackingOptions(
    order="random", replay=0.0, focus=0.0, fit="last", merge="none", merge_training=False
)
"""The heuristic of the paper (§4.2.1)."""


class Spec(_Strict):
    """Specification of a generation run. Relative paths start at the folder of the YAML file.

    base: folder of the checkpoint.
    items: the knowledge items.
    prefix: prefix of the adapters' names.
    seed: seed of all random numbers.
    split: shares of the examples for training, validation and test. Examples are split by image, so
        no image is in two of them.
    training: settings of each attempt.
    options: settings of the packing.
    """

    base: Path
    items: Annotated[tuple[Item, ...], Field(min_length=1)]
    prefix: Name = "packed"
    seed: Annotated[int, Field(ge=0)] = 0
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
    """Return the specification in a YAML file, with absolute paths.

    Raises InvalidArgument, which names each wrong key, its value and the valid values.
    """
    try:
        if path.stat().st_size > MAX_SPEC_BYTES:
            raise InvalidArgument(f"{path} has more than {MAX_SPEC_BYTES} bytes")
        loaded = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise InvalidArgument(f"{path} is not YAML: {error}") from error
    try:
        spec = Spec.model_validate(loaded)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, one['loc'])) or 'the file'}: {one['msg']}"
            for one in error.errors(include_url=False)
        ]
        raise InvalidArgument(f"{path}: " + "; ".join(problems)) from None
    return _with_absolute_paths(spec, path.resolve().parent)


def _with_absolute_paths(spec: Spec, folder: Path) -> Spec:
    """Return the specification with absolute paths; relative ones start at `folder`.

    Raises InvalidArgument for a path that does not exist.
    """

    def absolute(path: Path) -> Path:
        if not (folder / path).exists():
            raise InvalidArgument(f"{folder / path} does not exist")
        return folder / path

    items = []
    for item in spec.items:
        paths: dict[str, Any] = {"images": absolute(item.images)}
        for key in ("conversations", "truth"):
            if (path := getattr(item, key)) is not None:
                paths[key] = absolute(path)
        if item.teacher and item.teacher.onnx:
            onnx = item.teacher.onnx.model_copy(update={"file": absolute(item.teacher.onnx.file)})
            paths["teacher"] = item.teacher.model_copy(update={"onnx": onnx})
        items.append(item.model_copy(update=paths))
    return spec.model_copy(update={"base": absolute(spec.base), "items": tuple(items)})
