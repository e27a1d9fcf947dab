"""Tests of the feature cache and the service that fills it, with an encoder that records calls."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.polling import until
from vlora.errors import Internal, InvalidArgument
from vlora.metrics import EncoderCounters
from vlora.vision import features
from vlora.vision.encoder import PreparedImage
from vlora.vision.features import EncoderService, FeatureCache
from vlora.vision.images import DecodedImage

ROWS, HIDDEN = 4, 3
ENTRY_BYTES = ROWS * HIDDEN * 4
PACE = 1e-6
"""Seconds per image of a tower that is known to be fast."""


class FakeEncoder:
    """Encoder whose features are the mean colour of an image, repeated; it records every call.

    hold: called during each call, to delay it. failures: errors that the next calls raise.
    """

    hidden = HIDDEN
    prepare = staticmethod(lambda images: [PreparedImage(image, (2, 2)) for image in images])

    def __init__(self, tower_digest="tower", failures=()):
        self.tower_digest = tower_digest
        self.hold = lambda: None
        self.failures = list(failures)
        self.calls = []

    def encode(self, images, part=None):
        self.calls.append(len(images))
        self.hold()
        if self.failures:
            raise self.failures.pop()
        return [self.features_of(image) for image in images]

    @staticmethod
    def features_of(image):
        return np.tile(image.rgb.mean((0, 1)).astype(np.float32), (ROWS, 1))


def picture(colour, height=2, width=3, is_video=False):
    return DecodedImage(np.full((height, width, 3), colour, np.uint8), is_video)


def service(budget=10**6, **options):
    encoder = FakeEncoder(**options)
    return encoder, EncoderService(encoder, FeatureCache(budget), seconds_per_image=PACE)


def test_a_batch_holds_the_images_that_the_tower_encodes_in_the_target_time(monkeypatch):
    now = iter([0.0, 0.04, 1.0, 1.2, 2.0, 2.001])
    monkeypatch.setattr(features.time, "monotonic", lambda: next(now))
    encoder, _ = service()
    unknown = EncoderService(encoder, FeatureCache(10**6))
    assert unknown.images_per_batch == 1  # before the first call
    encoders = EncoderService(encoder, FeatureCache(10**6), seconds_per_image=PACE)
    encoders.run([[picture(1), picture(2)]])
    assert encoders.images_per_batch == int(features.TARGET_BATCH_SECONDS / 0.02)
    encoders.run([[picture(3)]])  # slower than the target
    assert encoders.images_per_batch == 1
    encoders.run([[picture(4)]])
    assert encoders.images_per_batch == 50


def test_a_batch_of_requests_is_encoded_in_one_call():
    encoder, encoders = service()
    batch = [[picture(1)], [], [picture(2), picture(3, 5, 4, is_video=True)]]
    answers = encoders.run(batch)
    assert encoder.calls == [3]
    assert [answer.features.shape for answer in answers] == [(4, 3), (0, 3), (8, 3)]
    np.testing.assert_array_equal(answers[2].features[4:], np.full((4, 3), 3, np.float32))
    assert answers[2].layout.tolist() == [[0, 4, 1, 2, 2, 0], [4, 4, 1, 2, 2, 1]]
    assert answers[2].size.tolist() == [[2, 3], [5, 4]]
    assert answers[1].layout.shape == (0, 6)
    assert answers[1].size.shape == (0, 2)
    assert answers[1].digests == ()
    for answer in answers:
        assert answer.features.dtype == np.float32
        assert answer.layout.dtype == answer.size.dtype == np.int32
    encoders.check_integrity()


def test_requests_without_images_do_not_call_the_tower():
    encoder, encoders = service()
    assert encoders.run([]) == []
    assert encoders.run([[], []])[1].features.shape == (0, HIDDEN)
    assert encoder.calls == []


def test_a_cached_image_is_not_encoded_again():
    encoder, encoders = service()
    first = encoders.run([[picture(1), picture(2)], [picture(1)]])
    again = encoders.run([[picture(2)]])
    assert encoder.calls == [2]
    np.testing.assert_array_equal(again[0].features, first[0].features[4:])
    assert first[0].digests[0] == first[1].digests[0] != first[0].digests[1]
    size = first[0].features.nbytes
    assert encoders.counters == EncoderCounters(images=4, hits=2, misses=2, batches=1, bytes=size)
    encoders.check_integrity()


def test_the_key_depends_on_content_shape_and_tower():
    _, one = service(tower_digest="a")
    _, other = service(tower_digest="b")
    keys = {
        encoders.run([[image]])[0].digests[0]
        for encoders in (one, other)
        for image in (picture(1, 2, 3), picture(1, 3, 2), picture(2, 2, 3))
    }
    assert len(keys) == 6
    still, frame = one.run([[picture(1), picture(1, is_video=True)]])[0].digests
    assert still == frame


def test_without_a_budget_every_image_is_encoded():
    encoder, encoders = service(budget=0)
    for _ in range(2):
        (answer,) = encoders.run([[picture(1), picture(1)]])
        np.testing.assert_array_equal(answer.features, np.ones((8, 3), np.float32))
    assert encoder.calls == [2, 2]
    assert encoders.counters.hits == 0
    encoders.check_integrity()


def test_many_misses_are_encoded_in_bounded_calls(monkeypatch):
    monkeypatch.setattr(features, "MAX_TOWER_BATCH", 4)
    encoder, encoders = service()
    (answer,) = encoders.run([[picture(i) for i in range(10)]])
    assert encoder.calls == [4, 4, 2]
    np.testing.assert_array_equal(answer.features[::ROWS, 0], np.arange(10, dtype=np.float32))


def test_the_least_recently_used_entry_is_evicted():
    encoder, encoders = service(budget=2 * ENTRY_BYTES)
    for colour in (1, 2, 1, 3, 1, 2):
        encoders.run([[picture(colour)]])
    assert sum(encoder.calls) == 4  # 1, 2, 3, and again 2, which 3 evicted
    assert encoders.counters.evictions == 2
    encoders.check_integrity()


def test_features_larger_than_the_budget_are_returned_but_not_cached():
    encoder, encoders = service(budget=ENTRY_BYTES - 1)
    for _ in range(2):
        assert encoders.run([[picture(7)]])[0].features[0, 0] == 7
    assert encoder.calls == [1, 1]
    encoders.check_integrity()


def test_changing_an_answer_does_not_change_the_cache():
    _, encoders = service()
    encoders.run([[picture(1)]])[0].features[:] = 99
    assert encoders.run([[picture(1)]])[0].features.max() == 1


def test_concurrent_misses_of_one_image_encode_it_once():
    encoder, encoders = service()
    encoder.hold = lambda: until(lambda: encoders.counters.hits == 7)
    start = threading.Barrier(8)

    def ask(i):
        start.wait()
        return encoders.run([[picture(1), picture(10 + i)]])[0]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    assert sum(encoder.calls) == 9
    for i, answer in enumerate(answers):
        assert answer.features[:, 0].tolist() == [1] * ROWS + [10 + i] * ROWS
    assert encoders.counters.hits == 7
    encoders.check_integrity()


def test_waiters_for_a_failed_encoding_get_its_error_and_the_next_call_retries():
    encoder, encoders = service(failures=[RuntimeError("out of memory")])
    encoder.hold = lambda: until(lambda: encoders.counters.hits == 1)
    answers = []

    def ask():
        try:
            encoders.run([[picture(1)]])
        except Internal as error:
            answers.append(error.message)

    leader = threading.Thread(target=ask)
    leader.start()
    until(lambda: encoder.calls)
    ask()
    leader.join()
    assert len(answers) == 2
    assert all("RuntimeError: out of memory" in answer for answer in answers)
    assert encoder.calls == [1]
    encoder.hold = lambda: None
    assert encoders.run([[picture(1)]])[0].features[0, 0] == 1
    encoders.check_integrity()


def test_a_failure_part_way_keeps_the_encoded_images_and_releases_all_waiters(monkeypatch):
    monkeypatch.setattr(features, "MAX_TOWER_BATCH", 2)
    encoder, encoders = service()
    encoder.encode_well = encoder.encode
    calls = []

    def encode(images, part=None):
        calls.append(len(images))
        if len(calls) == 2:
            raise InvalidArgument("too large")
        return encoder.encode_well(images)

    encoder.encode = encode
    with pytest.raises(InvalidArgument, match="too large"):
        encoders.run([[picture(i) for i in range(6)]])
    encoders.run([[picture(i) for i in range(6)]])
    assert calls == [2, 2, 2, 2]
    encoders.check_integrity()


def test_an_encoder_that_returns_too_few_features_is_an_error():
    encoder, encoders = service()
    encoder.encode = lambda images: []
    with pytest.raises(Internal):
        encoders.run([[picture(1)]])
    encoders.check_integrity()


@settings(max_examples=60, deadline=None)
@given(
    batches=st.lists(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=4), max_size=8),
    entries=st.integers(0, 6),
)
def test_answers_never_depend_on_the_cache(batches, entries):
    encoder, encoders = service(budget=entries * ENTRY_BYTES)
    for batch in batches:
        answers = encoders.run([[picture(colour) for colour in request] for request in batch])
        for request, answer in zip(batch, answers, strict=True):
            assert answer.features[::ROWS, 0].tolist() == request
            assert answer.layout[:, 0].tolist() == [i * ROWS for i in range(len(request))]
        encoders.check_integrity()
    assert sum(encoder.calls) == encoders.counters.misses


def test_images_are_counted_while_a_long_batch_is_encoded():
    """The probe reads the counter to tell a busy encoder from a hung one."""
    encoder, _ = service()
    slow = EncoderService(encoder, FeatureCache(10**6), features.MAX_CALL_SECONDS)
    counted = []
    encoder.hold = lambda: counted.append(slow.counters.images)
    slow.run([[picture(i) for i in range(5)]])
    assert counted[0] == 0
    assert encoder.calls[0] == 1
    assert counted == sorted(set(counted))
    assert slow.counters.images == 5
