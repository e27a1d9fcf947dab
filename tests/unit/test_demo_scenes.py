"""Tests that the demo's scenes, questions and training are reproducible from their seeds."""

import numpy as np
import pytest
import torch

from tools.demo import lexicon, train
from tools.demo.boxes import box_text, parse_boxes
from tools.demo.build import make_tokenizer
from tools.demo.dense import dense_batch
from tools.demo.heldout import DOMAINS, is_right, items
from tools.demo.packing import IGNORED
from tools.demo.questions import ask
from tools.demo.recipes import RECIPES
from tools.demo.scenes import base_scene, draw
from tools.demo.train import adapter_batch, ahead, joint_batch
from vlora.generation.metrics import iou


def rng(seed: int = 3) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("domain", DOMAINS)
def test_held_out_items_are_the_same_every_time(domain: str) -> None:
    first = items(domain, 2, start=1)
    assert first == items(domain, 3)[1:]
    assert all(len(item.images) == 1 or len(item.frames) == 6 for item in first)
    assert all(is_right(item, item.answer) for item in first)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_adapter_batches_are_the_same_every_time(name: str) -> None:
    one, two = adapter_batch(5, name), adapter_batch(5, name)
    assert np.array_equal(one.images, two.images)
    assert np.array_equal(one.tokens, two.tokens)
    assert not np.array_equal(one.images, adapter_batch(6, name).images)


def test_dense_batches_are_the_same_every_time() -> None:
    one, two = dense_batch(2, 1, 4), dense_batch(2, 1, 4)
    assert np.array_equal(one.images, two.images)
    assert np.array_equal(one.labels, two.labels)


def test_a_scene_drawn_at_a_larger_size_is_the_same_scene() -> None:
    scene = base_scene(rng(), 3)
    large = draw(scene, 256).pixels.reshape(64, 4, 64, 4, 3).mean((1, 3))
    assert np.abs(large - draw(scene).pixels).mean() < 6


def test_objects_do_not_overlap_and_counts_are_correct() -> None:
    for seed in range(20):
        scene = base_scene(rng(seed))
        boxes = [thing.box for thing in scene.things]
        assert all(iou(a, b) == 0 for i, a in enumerate(boxes) for b in boxes[:i])
        question = ask("count", scene, rng(seed))
        assert question is not None
        assert question.answer == str(len(boxes))


def test_box_text_round_trips_through_the_tokenizer_and_the_bins() -> None:
    tokenizer = make_tokenizer()
    text = box_text("red circle", [(3, 5, 21, 30), (40, 2, 63, 25)], 64)
    ids = tokenizer(text).input_ids
    assert len(ids) == 4 + 2 * 7
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert iou(parse_boxes(text, 64)[0], (3, 5, 21, 30)) > 0.8


@pytest.mark.parametrize("text", ["naïve  — 日本, ok ?", "a\n\n b ' s", "(16, 2016) <box", "🙂"])
def test_any_text_round_trips(text: str) -> None:
    tokenizer = make_tokenizer()
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_every_answer_word_is_one_token() -> None:
    tokenizer = make_tokenizer()
    for word in lexicon.all_words():
        assert len(tokenizer(word).input_ids) == len(tokenizer(f" {word}").input_ids) == 1


def test_branches_continue_the_shared_prefix_and_predict_their_answers() -> None:
    pack = joint_batch(0).pack
    for row in range(3):
        front = (pack.branches[row] == 0).sum()
        starts = np.flatnonzero(np.diff(pack.branches[row]) == 1) + 1
        assert set(pack.positions[row][starts]) == {front}
    row, column = pack.ends[0]
    assert pack.targets[row, column] == pack.tokens[row, column + 1] != IGNORED
    assert pack.targets[row, column - 1] == IGNORED


def _double(index: int) -> int:
    return 2 * index


def test_batches_of_the_worker_process_arrive_in_order() -> None:
    assert list(ahead(_double, 3)) == [0, 2, 4]


def test_training_lowers_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "ahead", lambda make, count: map(make, range(count)))
    torch.manual_seed(0)
    line = torch.nn.Linear(3, 2)
    losses = []

    def loss_of(index: int) -> torch.Tensor:
        drawn = torch.randn(5, 3, generator=torch.Generator().manual_seed(index))
        loss = (line(drawn) - drawn[:, :2]).square().mean()
        losses.append(float(loss.detach()))
        return loss

    train.run_steps("line", {"line": line}, int, loss_of, 60, 0.1, warmup=2)
    assert max(losses[-5:]) < 0.1 * min(losses[:5])
