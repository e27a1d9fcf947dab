"""Tests of the sinks of events, with a real webhook and a real MQTT broker, and of their queues."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pydantic", reason="the extra watch is not installed")

from pydantic import TypeAdapter, ValidationError

from tests.support.polling import until
from tests.support.watching import Hook, broker, free_port, hook, subscriber
from vlora.errors import ServerError
from vlora.strict_yaml import describe
from vlora.watch import sinks
from vlora.watch.disk_queue import DiskQueue
from vlora.watch.sinks import Delivery, SinkOptions

HOUR = 1200  # Messages of an hour with ten events a minute: their begins and ends.
SECRET = "s3cret-of-this-test"

READER: TypeAdapter[Any] = TypeAdapter(SinkOptions)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(sinks, "LAST_PAUSE", 0.1)


@contextmanager
def delivery(folder: Path, **options: Any) -> Iterator[Delivery]:
    made = Delivery(READER.validate_python({"name": "test", **options}), folder)
    try:
        yield made
    finally:
        made.close(60.0)


def message(number: int) -> bytes:
    return json.dumps({"camera": "gate", "id": number}).encode()


def numbers(messages: list[Any]) -> list[int]:
    """Return the numbers of the messages in the order of their first arrival."""
    return list(dict.fromkeys(one["id"] for one in messages))


def test_a_queue_drops_and_counts_the_oldest_beyond_its_bounds(tmp_path: Path) -> None:
    queue = DiskQueue(tmp_path / "q", 3, 100)
    for number in range(5):
        queue.put(b"%d" % number)
    assert (len(queue), queue.dropped, queue.size_bytes, queue.first()) == (3, 2, 3, (3, b"2"))
    queue.put(b"x" * 99)
    assert (len(queue), queue.dropped, queue.size_bytes) == (2, 4, 100)
    queue.put(b"y" * 101)
    assert (len(queue), queue.dropped) == (2, 5), "a message that never fits takes no other along"
    queue.close()
    again = DiskQueue(tmp_path / "q", 1, 100)
    assert (len(again), again.dropped, again.size_bytes) == (1, 1, 99)
    again.remove(999)
    assert len(again) == 1
    again.close()


def test_a_queue_in_use_or_damaged_is_refused_by_name(tmp_path: Path) -> None:
    queue = DiskQueue(tmp_path / "q", 3, 100)
    with pytest.raises(ServerError, match="another `vlora watch` may use it"):
        DiskQueue(tmp_path / "q", 3, 100)
    queue.close()
    (tmp_path / "bad").write_bytes(b"not a database, whatever its name says" * 100)
    with pytest.raises(ServerError, match=r"bad cannot be used: file is not a database"):
        DiskQueue(tmp_path / "bad", 3, 100)


def test_what_was_put_survives_a_kill(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from vlora.watch.disk_queue import DiskQueue
queue = DiskQueue(Path({str(tmp_path / "q")!r}), 10**6, 10**9)
for number in range(10**6):
    queue.put(b"%d" % number)
    print(number, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        last = [int(process.stdout.readline()) for _ in range(200)][-1]
        process.kill()
    queue = DiskQueue(tmp_path / "q", 10**6, 10**9)
    assert len(queue) > last
    for number in range(last + 1):
        assert queue.first() == (number + 1, b"%d" % number)
        queue.remove(number + 1)
    queue.close()


def test_a_full_disk_drops_and_counts_what_it_refuses(tmp_path: Path) -> None:
    queue = DiskQueue(tmp_path / "q", 100, 10**7)
    queue.put(b"first")
    pages = queue._file.execute("PRAGMA page_count").fetchone()[0]
    queue._file.execute(f"PRAGMA max_page_count = {pages + 2}")  # SQLite's "disk is full"
    queue.put(b"x" * 10**6)
    assert (len(queue), queue.dropped, queue.first()) == (1, 1, (1, b"first"))
    queue.close()


def test_lines_are_appended_to_a_file_that_may_be_renamed(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with delivery(tmp_path, kind="jsonl", path=path) as sink:
        sink.put(message(0))
        until(path.exists)
        path.rename(tmp_path / "old.jsonl")
        sink.put(message(1))
        until(path.exists)
    assert (tmp_path / "old.jsonl").read_bytes() == message(0) + b"\n"
    assert path.read_bytes() == message(1) + b"\n"


def test_lines_on_a_standard_output_that_nobody_reads_hold_up_nothing(tmp_path: Path) -> None:
    code = f"""
import sys, time
from pathlib import Path
from vlora.watch.sinks import Delivery, JsonLinesOptions
sink = Delivery(JsonLinesOptions(kind="jsonl", name="log"), Path({str(tmp_path)!r}))
sink.put(b"a short line")
while not sink.counts()["sent"]:
    time.sleep(0.01)
sink.put(b"x" * 10**6)  # more than a pipe holds
sink.close(0.5)
print(sink.counts()["sent"], file=sys.stderr)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=-1, stderr=-1) as process:
        assert process.wait(30) == 0
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"a short line\n"
        assert process.stderr.read() == b"1\n"


def test_a_full_disk_leaves_no_half_line_and_loses_none(tmp_path: Path) -> None:
    """The limit of a file's size stands for a full disk."""
    code = f"""
import json, resource, signal
from pathlib import Path
from vlora.watch.sinks import JsonLines, SinkAway
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sink = JsonLines(Path({str(tmp_path / "lines")!r}))
sink.send(b"a" * 60)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
for _ in range(2):
    try:
        sink.send(b"b" * 60)
    except SinkAway as error:
        print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
sink.send(b"b" * 60)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) == 2
    assert (tmp_path / "lines").read_bytes() == b"a" * 60 + b"\n" + b"b" * 60 + b"\n"


def test_a_webhook_that_is_away_for_an_hour_loses_nothing(tmp_path: Path) -> None:
    port = free_port()
    with delivery(tmp_path, kind="webhook", url=f"http://127.0.0.1:{port}/") as sink:
        for number in range(HOUR):
            sink.put(message(number))
        until(lambda: sink.counts()["failures"] >= 2)
        counts = sink.counts()
        assert (counts["queued"], counts["dropped"]) == (HOUR, 0)
        assert counts["away"] == "no answer of the webhook: Connection refused"
        with hook(port=port) as receiver:
            until(lambda: sink.counts()["queued"] == 0)
        assert numbers(receiver.messages) == list(range(HOUR))
        assert sink.counts()["away"] == ""


def test_what_waits_is_sent_after_a_restart(tmp_path: Path) -> None:
    port = free_port()
    options = {"kind": "webhook", "url": f"http://127.0.0.1:{port}/"}
    with delivery(tmp_path, **options) as sink:
        sink.put(message(0))
    with hook(port=port) as receiver:
        with delivery(tmp_path, **options) as sink:
            until(lambda: sink.counts()["sent"] == 1)
            sink.put(message(1))  # Closing sends it.
        assert numbers(receiver.messages) == [0, 1]


def test_a_webhook_is_asked_again_until_it_takes_or_refuses_the_message(tmp_path: Path) -> None:
    answers = iter([500, 503, 302, 404, 200, 422, 204])
    with (
        hook(lambda body: next(answers)) as receiver,
        delivery(tmp_path, kind="webhook", url=f"http://127.0.0.1:{receiver.port}/x") as sink,
    ):
        for number in range(3):
            sink.put(message(number))
        until(lambda: sink.counts()["queued"] == 0)
        assert [one["id"] for one in receiver.messages] == [0, 0, 0, 0, 0, 1, 2]
        counts = sink.counts()
        assert (counts["sent"], counts["refused"], counts["failures"]) == (2, 1, 4)


def test_a_slow_webhook_delays_neither_its_caller_nor_another_sink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "ANSWER_SECONDS", 0.2)
    released = threading.Event()
    with hook(lambda body: 200 if released.wait(30) else 500) as slow:
        url = f"http://127.0.0.1:{slow.port}/"
        with (
            delivery(tmp_path, kind="webhook", url=url) as sink,
            delivery(tmp_path, name="b", kind="jsonl", path=tmp_path / "lines") as other,
        ):
            for number in range(20):
                sink.put(message(number))
                other.put(message(number))
            until(lambda: other.counts()["sent"] == 20)
            until(lambda: sink.counts()["failures"] > 0)
            assert sink.counts()["away"].startswith("no answer of the webhook: ")
            assert sink.counts()["sent"] == 0
            released.set()
            until(lambda: sink.counts()["queued"] == 0)
            assert sink.counts()["dropped"] == 0


@contextmanager
def listening(talk: Callable[[socket.socket], None]) -> Iterator[int]:
    """Yield the port of a server that talks to one client after the other."""

    def run() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                with client, suppress(OSError):
                    talk(client)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=run, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("begin", "more", "taken"),
    [
        (b"HTTP/1.1 200 OK\r\nX: ", b"y", True),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\n", b"y", True),
    ],
    ids=["a header", "no answer yet", "a body"],
)
def test_an_answer_that_does_not_end_is_cut_off(
    begin: bytes, more: bytes, taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "ANSWER_SECONDS", 0.3)

    def talk(client: socket.socket) -> None:
        client.recv(1 << 16)
        client.sendall(begin)
        while True:
            client.sendall(more)
            time.sleep(0.02)

    with (
        listening(talk) as port,
        delivery(tmp_path, kind="webhook", url=f"http://127.0.0.1:{port}/") as sink,
    ):
        sink.put(message(0))
        until(lambda: sink.counts()["sent" if taken else "failures"])
        assert taken or sink.counts()["away"].startswith("no answer of the webhook: ")


def test_the_secret_comes_from_the_environment_and_is_told_to_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOOK_SECRET", SECRET)
    where = {"header": "X-Token", "secret_env": "HOOK_SECRET"}
    answers = iter([302, 500, 200])
    with hook(lambda body: next(answers)) as receiver:
        url = f"http://127.0.0.1:{receiver.port}/${{HOOK_SECRET}}"
        with delivery(tmp_path, kind="webhook", url=url, **where) as sink:
            sink.put(message(0))
            until(lambda: sink.counts()["sent"])
        assert [headers["x-token"] for headers in receiver.headers] == [SECRET] * 3
    with delivery(tmp_path, kind="webhook", url=f"{url}\r\nX: y", **where) as sink:
        sink.put(message(1))
        until(lambda: sink.counts()["failures"])
        assert SECRET not in str(sink.counts())
    assert SECRET not in "".join(capfd.readouterr())
    assert all(SECRET.encode() not in file.read_bytes() for file in tmp_path.iterdir())
    monkeypatch.delenv("HOOK_SECRET")
    with pytest.raises(ServerError, match="no variable HOOK_SECRET, which a sink names"):
        Delivery(READER.validate_python({"name": "b", "kind": "webhook", "url": url}), tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "webhook", "url": "ftp://x"}, "url: must be http://… or https://…"),
        ({"kind": "webhook", "url": "http://me:pw@x"}, "a password belongs in secret_env"),
        ({"kind": "jsonl", "paht": "x"}, "unknown key 'paht'; did you mean 'path'?"),
        ({"kind": "jsonl", "name": "../x"}, "name is '../x', but should match pattern"),
        ({"kind": "mqtt", "host": "x", "topic": "a/#"}, "topic is 'a/#', but should match"),
        ({"kind": "kafka"}, "does not match any of the expected tags: 'jsonl', 'webhook', 'mqtt'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        READER.validate_python({"name": "test", **options})
    assert message in describe(caught.value)
    assert "me:pw" not in describe(caught.value)


def test_a_broker_that_is_away_loses_nothing_and_keeps_the_states(tmp_path: Path) -> None:
    options = {"kind": "mqtt", "host": "127.0.0.1", "keepalive_seconds": 5}
    state = "vlora/gate%2F%2B%23%25ü/state"
    with broker(tmp_path) as running, subscriber(running.port) as messages:
        with delivery(tmp_path, port=running.port, **options) as sink:
            sink.tell("gate/+#%ü", b"first")
            sink.put(message(0))
            until(lambda: (state, b"first") in messages)
            until(lambda: sink.counts()["sent"] == 1)
            running.stop()
            sink.tell("gate/+#%ü", b"last")
            for number in range(1, HOUR):
                sink.put(message(number))
            until(lambda: sink.counts()["away"])
            running.start()
            until(lambda: sink.counts()["queued"] == 0)
            until(lambda: (state, b"last") in messages)
            until(lambda: len(_events(messages)) == HOUR)
            assert _events(messages) == list(range(HOUR))
            assert dict(messages)["vlora/watch"] == b"online"
            sink.tell("gate/+#%ü", b"")
        with subscriber(running.port) as later:
            until(lambda: later)
            assert later == [("vlora/watch", b"offline")]


def test_a_broker_that_hangs_gets_a_message_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "ANSWER_SECONDS", 0.05)
    options = {"kind": "mqtt", "host": "127.0.0.1"}
    with broker(tmp_path) as running, subscriber(running.port) as messages:
        with delivery(tmp_path, port=running.port, **options) as sink:
            until(lambda: not sink.counts()["away"])
            running.freeze(True)
            try:
                sink.put(message(0))
                until(lambda: sink.counts()["failures"] >= 3)
                away = sink.counts()["away"]
            finally:
                running.freeze(False)
            assert away == "the broker does not confirm the message"
            until(lambda: sink.counts()["sent"] == 1)
        until(lambda: dict(messages).get("vlora/watch") == b"offline")
        assert [body for topic, body in messages if topic == "vlora/gate/event"] == [message(0)]


def test_a_broker_that_confirms_nothing_is_told_only_the_last_states_again(tmp_path: Path) -> None:
    seen: list[bytes] = []

    def talk(client: socket.socket) -> None:
        seen.append(client.recv(1 << 16))
        client.sendall(b"\x20\x02\x00\x00")
        while b"state of number 99" not in seen[-1] and (part := client.recv(1 << 16)):
            seen[-1] += part

    with (
        listening(talk) as port,
        delivery(tmp_path, kind="mqtt", host="127.0.0.1", port=port) as sink,
    ):
        until(lambda: not sink.counts()["away"])
        for number in range(100):
            sink.tell("gate", b"state of number %d" % number)
        until(lambda: len(seen) > 1 and b"state of number 99" in seen[1])
    assert seen[0].count(b"state of number") == 100
    assert seen[1].count(b"state of number") == 1


def _events(messages: list[tuple[str, bytes]]) -> list[int]:
    return numbers([json.loads(body) for topic, body in messages if topic == "vlora/gate/event"])


def test_a_killed_watch_leaves_its_last_will(tmp_path: Path) -> None:
    with broker(tmp_path) as running, subscriber(running.port) as messages:
        code = f"""
import time
from pathlib import Path
from vlora.watch.sinks import Delivery, MqttOptions
options = MqttOptions(kind="mqtt", name="bus", host="127.0.0.1", port={running.port})
Delivery(options, Path({str(tmp_path)!r})).put(b'{{"camera": "gate", "id": 1}}')
time.sleep(60)
"""
        process = subprocess.Popen([sys.executable, "-c", code])
        try:
            until(lambda: "vlora/gate/event" in dict(messages))
            assert dict(messages)["vlora/watch"] == b"online"
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        until(lambda: dict(messages)["vlora/watch"] == b"offline")


def test_a_broker_that_refuses_the_password_is_told_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUS_PASSWORD", SECRET)
    options = {"kind": "mqtt", "host": "127.0.0.1", "username": "watch"}
    options |= {"password_env": "BUS_PASSWORD"}
    with broker(tmp_path, watch="another") as running:
        with delivery(tmp_path, port=running.port, **options) as sink:
            sink.put(message(0))
            until(lambda: sink.counts()["away"].startswith("the broker refuses"))
            assert sink.counts()["away"] == "the broker refuses the connection: Not authorized"
            assert sink.counts()["queued"] == 1
        monkeypatch.setenv("BUS_PASSWORD", "another")
        with delivery(tmp_path, port=running.port, **options) as sink:
            until(lambda: sink.counts()["sent"] == 1)


def test_closing_does_not_wait_for_a_sink_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "ANSWER_SECONDS", 60.0)
    released = threading.Event()
    receiver = Hook(lambda body: 200 if released.wait(60) else 500)
    try:
        url = f"http://127.0.0.1:{receiver.port}/"
        sink = Delivery(
            READER.validate_python({"name": "a", "kind": "webhook", "url": url}), tmp_path
        )
        sink.put(message(0))
        until(lambda: receiver.bodies)
        sink.close(0.3)
        assert sink._sent == sink._failures == 0, "the webhook has not answered"
        again = DiskQueue(tmp_path / "a.queue", 10, 1000)
        assert len(again) == 1
        again.close()
    finally:
        released.set()
        receiver.close()
