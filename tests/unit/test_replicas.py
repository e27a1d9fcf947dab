"""Tests of several servers behind Envoy, with fake servers and without Envoy."""

from __future__ import annotations

import json
import math
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.polling import until
from vlora.cli import app
from vlora.errors import InvalidArgument, ServerError
from vlora.launcher import envoy, replicas, server_log
from vlora.launcher.envoy import Server, write_configuration, write_servers
from vlora.launcher.replica_metrics import joined
from vlora.launcher.replicas import Replica, Replicas, Status, shares_of
from vlora.launcher.repository import ServerOptions
from vlora.launcher.supervisor import RestartPolicy
from vlora.server_run import PEERS_VARIABLE
from vlora.serving.peer_cancels import PeerCancels


class FakeServer:
    """A server that serves until it `breaks`, and notes how it is stopped."""

    made: list[FakeServer]
    failures = 0.0  # Number of times that a server fails to open.

    def __init__(self, options: ServerOptions, tell: Callable[[Status], None]) -> None:
        self.options = replace(options, http_port=1, grpc_port=2)
        self.log = Path("log")
        self.breaks = self.is_running = False
        self.stops: list[bool] = []
        self._tell = tell
        self.made.append(self)

    def open(self, report: Callable[[str], None]) -> None:
        if FakeServer.failures:
            FakeServer.failures -= 1
            raise OSError("no space is left on the device")
        self.is_running = True
        self._tell(Status.SERVING)

    def failure(self) -> str | None:
        return "it broke" if self.breaks else None

    def explain(self) -> str:
        return ""

    def adapter_news(self) -> server_log.AdapterNews:
        return server_log.AdapterNews(self.log, 0)

    def stop(self) -> None:
        self._tell(Status.DRAINING)
        self.stops.append(self.options.hand_over)
        self.kill()

    def kill(self) -> None:
        self.is_running = False
        self._tell(Status.DOWN)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[FakeServer]:
    FakeServer.made = []
    monkeypatch.setattr(FakeServer, "failures", 0)
    monkeypatch.setattr(replicas, "ReplicaServer", FakeServer)
    monkeypatch.setattr(replicas, "RestartPolicy", lambda: RestartPolicy(first_wait=0.01))
    return FakeServer.made


@pytest.fixture
def statuses() -> list[Status]:
    return []


@pytest.fixture
def replica(made: list[FakeServer], statuses: list[Status]) -> Iterator[Replica]:
    cores = sorted(os.sched_getaffinity(0))
    options = ServerOptions(hand_over=True)
    one = Replica("0", options, cores, print, lambda: statuses.append(one.status))
    one.start()
    until(lambda: one.status is Status.SERVING)
    yield one
    one.kill()


def test_a_replica_hands_over_when_it_is_restarted_and_finishes_when_it_is_stopped(
    replica: Replica, made: list[FakeServer], statuses: list[Status]
) -> None:
    first, told = made[-1], threading.Event()
    stop = first.stop
    first.stop = lambda: told.wait(60) and stop()  # type: ignore[method-assign,assignment,return-value]
    replica.restart()
    assert replica.status is Status.DRAINING, "Envoy is told before the drain begins"
    told.set()
    until(lambda: made[-1] is not first and replica.status is Status.SERVING)
    replica.stop()
    replica.join()
    assert (first.stops, made[-1].stops) == ([True], [False])
    cycle = [Status.SERVING, Status.DRAINING, Status.DOWN]
    assert statuses == [*cycle, *cycle]
    assert made[-1].options.http_port == first.options.http_port


def test_a_replica_that_breaks_is_started_again(
    replica: Replica, made: list[FakeServer], statuses: list[Status]
) -> None:
    made[-1].breaks = True
    until(lambda: statuses == [Status.SERVING, Status.DOWN, Status.SERVING])
    assert replica.error is None


def test_only_a_replica_that_was_ready_says_why_it_ended(
    replica: Replica, made: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = made[-1]
    monkeypatch.setattr(FakeServer, "failures", math.inf)
    said: list[str] = []
    cores = sorted(os.sched_getaffinity(0))
    new = Replica("1", ServerOptions(), cores, said.append, lambda: None)
    new.start()
    new.join()
    assert isinstance(new.error, OSError), "it is raised by the start"
    assert not any("no space is left" in text for text in said)
    monkeypatch.setattr(replica, "_say", said.append)
    running.breaks = True
    until(lambda: not replica.is_alive)
    assert said[-1].startswith("no space is left on the device")


def test_a_server_that_dies_while_a_replica_restarts_is_started_again(
    replica: Replica, made: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeServer, "failures", RestartPolicy().max_failures - 1)
    replica.restart()
    until(lambda: FakeServer.failures == 0 and replica.status is Status.SERVING)
    assert replica.error is None


def test_a_replica_outlives_a_full_disk(
    both: Any,
    made: list[FakeServer],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def full(folder: Path, servers: Any) -> None:
        raise OSError("no space is left on the device")

    first, second = both.replicas
    monkeypatch.setattr(FakeServer, "failures", math.inf)
    with monkeypatch.context() as disk:
        disk.setattr(envoy, "write_servers", full)
        first.server.breaks = True
        until(lambda: len(made) > 2 and both._unwritten)
    monkeypatch.setattr(FakeServer, "failures", 0)
    until(lambda: first.status is Status.SERVING)
    assert second.status is Status.SERVING
    both._write()
    assert not both._unwritten
    assert (tmp_path / "servers_grpc.yaml").read_text().count('"HEALTHY"') == 2


@pytest.fixture
def both(made: list[FakeServer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    monkeypatch.setattr(envoy, "program", lambda: Path("envoy"))
    monkeypatch.setattr(replicas, "shares_of", lambda items, count, name: [items] * count)
    monkeypatch.setattr(Replicas, "_start_envoy", lambda self: None)
    monkeypatch.setattr(Replicas, "_wait_for_envoy", lambda self: None)
    running = Replicas(ServerOptions(), 2, print, on_gpus=False)
    running._folder = tmp_path
    running._start()
    yield running
    for one in running.replicas:
        one.kill()


def test_a_rolling_restart_takes_one_replica_at_a_time(
    both: Any, made: list[FakeServer], tmp_path: Path
) -> None:
    (first, second), before = both.replicas, made[-2:]
    both._to_restart = [first, second]
    for restarted in (first, second):
        old = restarted.server
        both._restart_next()
        both._restart_next()
        until(lambda was=old, one=restarted: one.server is not was)
        until(lambda: {one.status for one in both.replicas} == {Status.SERVING})
    both._restart_next()
    assert both._to_restart is None
    assert [server.stops for server in before] == [[True], [True]]
    assert len(made) == 2 + 2 + 2
    written = tmp_path / "servers_grpc.yaml"
    until(lambda: written.read_text().count('"HEALTHY"') == 2)


def test_a_rolling_restart_ends_with_a_replica_that_does_not_start(
    both: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = both.replicas
    both._to_restart = [first, second]
    monkeypatch.setattr(FakeServer, "failures", math.inf)
    both._restart_next()
    until(lambda: not first.is_alive)
    both._restart_next()
    assert both._to_restart is None
    assert second.status is Status.SERVING
    assert both.failure() is None


def test_replicas_share_cores_and_refuse_what_they_cannot_do(
    made: list[FakeServer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert shares_of([0, 1, 2, 3, 4], 2, "cores") == [[0, 1], [2, 3, 4]]
    with pytest.raises(ServerError, match="--replicas 3 needs as many cores; there are 2"):
        shares_of([0, 1], 3, "cores")
    with pytest.raises(ServerError, match="--allow-shared-memory does not work with --replicas"):
        Replicas(ServerOptions(allow_shared_memory=True), 2, print, on_gpus=False)
    for mutual in ("", "-mutual"):
        options = ServerOptions(triton_arguments=(f"--grpc-use-ssl{mutual}=true",))
        with pytest.raises(ServerError, match=f"ssl{mutual}=true does not work with --replicas"):
            Replicas(options, 2, print, on_gpus=False)
    monkeypatch.setattr(envoy, "find_program", lambda: None)
    with pytest.raises(ServerError, match="Envoy is not installed"):
        Replicas(ServerOptions(), 2, print, on_gpus=False)
    monkeypatch.setattr(envoy, "find_program", lambda: Path("envoy"))
    monkeypatch.setattr(replicas, "shares_of", lambda items, count, name: [items] * count)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("long" * 20)))
    with pytest.raises(ServerError, match="set TMPDIR to a shorter one"):
        Replicas(ServerOptions(), 2, print, on_gpus=False).run(lambda one, seconds: None)


def test_replicas_that_do_not_fit_the_memory_are_refused_with_the_sizes(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(envoy, "find_program", lambda: Path("envoy"))
    monkeypatch.setattr(replicas, "shares_of", lambda items, count, name: [items] * count)
    command = ["serve", "--replicas", "2", "--model", str(checkpoint), "--http-port", "0"]
    command += ["--grpc-port", "0", "--metrics-port", "0", "--set", "kv_cache_tokens=1000000000"]
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 1
    found = re.search(r"needs about ([\d.]+) GiB of memory, and ([\d.]+) GiB are", refused.output)
    assert found, refused.output
    assert float(found[1]) > float(found[2])


def test_a_command_writes_the_files_of_envoy_for_several_hosts(tmp_path: Path) -> None:
    command = ["envoy", str(tmp_path / "new"), "--server", "127.0.0.1", "--server", "[::1]:10:11"]
    printed = CliRunner().invoke(app, command)
    assert f"-c {tmp_path}/new/envoy.yaml" in printed.output
    config = json.loads((tmp_path / "new" / "envoy.yaml").read_text())
    assert all("health_checks" in one for one in config["static_resources"]["clusters"])
    assert '"::1"' in (tmp_path / "new" / "servers_grpc.yaml").read_text()
    refused = CliRunner().invoke(app, [*command, "--server", "host:1"])
    assert "--server takes HOST or HOST:HTTP:GRPC, not 'host:1'" in refused.output


def test_the_files_of_envoy_name_the_servers(tmp_path: Path) -> None:
    path = write_configuration(tmp_path, "127.0.0.1", [1, 2], health_checks=False)
    config = json.loads(path.read_text())
    assert config["admin"]["address"]["pipe"]["mode"] == 0o600
    assert [one["name"] for one in config["static_resources"]["listeners"]] == ["serving"]
    write_servers(tmp_path, [Server("127.0.0.1", 10, 11), Server("127.0.0.1", 20, 21, True)])
    for name, ports in (("servers_grpc", [11, 21]), ("servers_http", [10, 20])):
        (resource,) = json.loads((tmp_path / f"{name}.yaml").read_text())["resources"]
        found = resource["endpoints"][0]["lb_endpoints"]
        sockets = [one["endpoint"]["address"]["socket_address"] for one in found]
        assert [one["port_value"] for one in sockets] == ports
        assert [one["health_status"] for one in found] == ["HEALTHY", "DRAINING"]
    with pytest.raises(ServerError, match=r"server 'no-host\.invalid' is unknown"):
        write_servers(tmp_path, [Server("no-host.invalid", 1, 2)])


def test_the_metrics_of_all_replicas_are_one_page_with_a_label() -> None:
    page = '# HELP a Text\n# TYPE a histogram\na_bucket{le="1"} 2\na_sum 3\n'
    other = "# HELP b Text\n# TYPE b gauge\nb 4\n# HELP a Text\n# TYPE a histogram\na_sum 5e3\n"
    assert joined({"0": page, "1": other}).splitlines() == [
        "# HELP a Text",
        "# TYPE a histogram",
        'a_bucket{replica="0",le="1"} 2',
        'a_sum{replica="0"} 3',
        'a_sum{replica="1"} 5e3',
        "# HELP b Text",
        "# TYPE b gauge",
        'b{replica="1"} 4',
    ]


def test_a_cancellation_reaches_all_other_replicas_that_listen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    alone = PeerCancels()
    alone.send("an-id-of-nobody")
    monkeypatch.setenv(PEERS_VARIABLE, str(tmp_path))
    heard = []

    def refuse(client_id: str) -> None:
        heard.append(client_id)
        raise InvalidArgument("too short")

    # One that is starting does not: Triton can crash if it calls another model.
    starting, *others = (PeerCancels() for _ in range(3))
    assert [*tmp_path.iterdir()] == []
    for number, peer in enumerate(others, 2):
        monkeypatch.setattr(os, "getpid", lambda number=number: number)
        peer.listen(refuse)
        peer.listen(refuse)
    others[1].close()
    until(lambda: [one.name for one in threading.enumerate()].count("peers") == 1)
    (tmp_path / "9.cancels").touch()  # What a replica that was killed leaves behind.
    for client_id in ("ä" * 1024, "second"):
        starting.send(client_id)
    until(lambda: len(heard) == 2)
    assert heard == ["ä" * 1024, "second"]
    starting.close()
    others[0].close()
    assert [*tmp_path.iterdir()] == []
