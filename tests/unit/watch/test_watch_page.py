"""Tests of the page of `vlora watch`, by plain HTTP and in a browser."""

from __future__ import annotations

import base64
import io
import json
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pydantic", reason="the extra watch is not installed")
pytest.importorskip("starlette", reason="the extra watch is not installed")

from tests.support.browser import Page, barriers, browser
from tests.support.polling import until
from tests.support.watching import answer, jpeg, view
from vlora.errors import ServerError
from vlora.static_pages import POLICY
from vlora.watch import page as page_module
from vlora.watch.answers import CameraView
from vlora.watch.desk import AlertDesk, open_desk
from vlora.watch.page import PAGE, SHARED, PageOptions, WatchPage
from vlora.watch.rules import AlertRule
from vlora.watch.store import Retention

PASSWORD = "p4ss-of-this-test"
XSS = "<img src=x onerror=\"document.title='pwned'\"><script>document.title='pwned'</script>"
FILES = sorted(PAGE.iterdir())
MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser"
    r"|localStorage|sessionStorage|document\.cookie"
)


class Site:
    """A running page. cameras: what it shows, which a test may change."""

    def __init__(self, page: WatchPage, desk: AlertDesk, cameras: list[CameraView]) -> None:
        self.url, self.desk, self.cameras = page.url, desk, cameras

    def begin(self, text: str = "yes", **fields: Any) -> dict[str, Any]:
        """Begin an event, and return its record."""
        known = len(self.desk.newest())
        rule = AlertRule.model_validate(
            {"name": fields.pop("rule", "people"), "when": {"regex": "."}}
        )
        self.desk.take([rule], answer(text, time.time(), **fields))
        until(lambda: len(self.desk.newest()) > known)
        return self.desk.newest()[0]

    def get(self, path: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
        """Return status, body and headers of a response."""
        names = {name.replace("_", "-"): text for name, text in headers.items()}
        request = urllib.request.Request(self.url + path, headers=names)
        try:
            with urllib.request.urlopen(request, timeout=30) as got:
                return got.status, got.read(), dict(got.headers)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read(), dict(error.headers)


@contextmanager
def site(folder: Path, **options: Any) -> Iterator[Site]:
    cameras: list[CameraView] = []
    desk = open_desk([], Retention(folder=folder))
    page = WatchPage(PageOptions(**{"listen": "127.0.0.1:0", **options}), lambda: cameras, desk)
    try:
        yield Site(page, desk, cameras)
    finally:
        page.close()
        desk.close(2.0)


@pytest.fixture(autouse=True)
def _fresh_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "SNAPSHOT_SECONDS", 0.0)


def mp4(seconds: int = 4) -> bytes:
    """Return a video with random content, ten frames a second."""
    av = pytest.importorskip("av", reason="the extra video is not installed")
    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (10, 48, 64, 3), np.uint8)
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=10, options={"g": "10"})
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number in range(10 * seconds):
            frame = av.VideoFrame.from_ndarray(pixels[number % 10], format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def test_the_state_has_cameras_and_events_and_is_sent_again_only_if_changed(
    tmp_path: Path,
) -> None:
    with site(tmp_path) as running:
        running.cameras.append(view("gate", picture=jpeg(), answer="x" * 5000, chunks=3, lag=0.25))
        record = running.begin(objects=[{"label": "person", "box": [1, 2, 3, 4]}])
        status, body, headers = running.get("state")
        state = json.loads(body)
        camera = {"name": "gate", "answer": "x" * 4000, "picture": True, "chunks": 3, "events": 1}
        assert camera.items() <= state["cameras"][0].items()
        del record["objects"]
        assert state["events"] == [record]
        assert (status, headers["content-security-policy"]) == (200, POLICY)
        assert running.get("state", if_none_match=headers["etag"])[:2] == (304, b"")
        running.cameras[0]["chunks"] = 4
        assert running.get("state", if_none_match=headers["etag"])[0] == 200


def test_pictures_and_files_are_served_with_ranges_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    name = "gate & 日本/../x"
    with site(tmp_path) as running:
        running.cameras += [view(name, picture=jpeg(1)), view("dark")]
        query = "camera=gate+%26+%E6%97%A5%E6%9C%AC/../x"
        assert running.get(f"picture?{query}")[:2] == (200, jpeg(1))
        for missing in ("picture", "picture?camera=dark", "picture?camera=none"):
            assert running.get(missing)[0] == 404
        content = bytes(range(256)) * 40
        record = running.begin(picture=jpeg(2), clip=lambda begin, end: content)
        assert running.get(f"events/{record['picture']}")[:2] == (200, jpeg(2))
        status, body, headers = running.get(f"events/{record['clip']}", range="bytes=100-199")
        assert (status, body) == (206, content[100:200])
        assert headers["content-type"] == "video/mp4"
        assert headers["content-range"] == f"bytes 100-199/{len(content)}"
        for outside in ("../secret", "..%2fsecret", "%2e%2e/secret", ".", "x.jpg", "%00.jpg"):
            status, body, _ = running.get(f"events/{outside}")
            assert (status, b"secret" in body) == (404, False), outside
        for outside in ("..%2fpage.py", "../page.py", "api.js"):
            assert running.get(outside)[0] == 404


@pytest.mark.parametrize("path", ["", "watch.js", "watch.css", *SHARED])
def test_every_file_of_the_page_has_the_security_headers(tmp_path: Path, path: str) -> None:
    with site(tmp_path) as running:
        status, body, headers = running.get(path)
    assert (status, bool(body)) == (200, True)
    assert headers["content-security-policy"] == POLICY
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_page_builds_no_markup_and_loads_nothing_from_elsewhere(file: Path) -> None:
    text = file.read_text()
    assert MARKUP.findall(text) == []
    assert re.findall(r"https?://", text) == []
    assert re.findall(r"<style|\sstyle=|\son\w+=|javascript:", text) == []


def test_another_host_name_is_refused_without_a_password(tmp_path: Path) -> None:
    """A page of another origin, whose name is made to point here, sends its own name."""
    with site(tmp_path) as running:
        port = running.url.split(":")[2].strip("/")
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "[", ""):
            assert running.get("state", host=host)[0] == 403, host
        for host in ("localhost", f"localhost:{port}", f"[::1]:{port}", "127.0.0.1"):
            assert running.get("state", host=host)[0] == 200, host


def test_a_page_for_a_network_needs_a_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(page_module, "WRONG_PASSWORD_SECONDS", 0.01)
    options = {"listen": "0.0.0.0:0", "password_env": "PAGE_PASSWORD"}
    reason = "open to a network, which needs a password; set the environment variable PAGE_PASSWORD"
    with pytest.raises(ServerError, match=reason):
        PageOptions(**options).address()
    monkeypatch.setenv("PAGE_PASSWORD", PASSWORD)
    with site(tmp_path, **options) as running:
        for path in ("", "state", "metrics", "picture?camera=x", "watch.js", "events/x.jpg"):
            status, _, headers = running.get(path)
            assert (status, headers["www-authenticate"][:5]) == (401, "Basic"), path
        for wrong in ("x", "x:wrong", f"{PASSWORD}:", PASSWORD, f"x:{PASSWORD}x", "ü:ü"):
            header = f"Basic {base64.b64encode(wrong.encode()).decode()}"
            assert running.get("state", authorization=header)[0] == 401, wrong
        for header in ("Basic ?", "Basic", f"Bearer {PASSWORD}", f"Basic x:{PASSWORD}"):
            assert running.get("state", authorization=header)[0] == 401, header
        right = base64.b64encode(f"anybody:{PASSWORD}".encode()).decode()
        status, body, _ = running.get("state", authorization=f"Basic {right}", host="cams.example")
        assert status == 200
        assert PASSWORD.encode() not in body
    assert PASSWORD not in "".join(capfd.readouterr())
    for wrong in ("1:2:80", "8090", "127.0.0.1:x", "localhost:8090"):
        with pytest.raises(ServerError, match=f"listens at IP:PORT, .*, not '{wrong}'"):
            PageOptions(listen=wrong).address()


def test_metrics_have_a_row_per_camera_and_sink(tmp_path: Path) -> None:
    client = pytest.importorskip("prometheus_client.parser", reason="prometheus-client is missing")
    with site(tmp_path) as running:
        name = 'a "gate"\\\n'
        running.cameras += [view(name, chunks=7, drops=2, lag=0.5, skipped=0.25), view("dark")]
        running.begin(camera=name)
        text = running.get("metrics")[1].decode()
    families = list(client.text_string_to_metric_families(text))
    samples = {
        (one.name, one.labels.get("camera")): one.value
        for family in families
        for one in family.samples
    }
    assert samples["vlora_watch_chunks_total", name] == 7
    assert samples["vlora_watch_dropped_chunks_total", name] == 2
    assert samples["vlora_watch_lag_seconds", name] == 0.5
    assert ("vlora_watch_lag_seconds", "dark") not in samples
    assert samples["vlora_watch_events_total", name] == 1
    assert samples["vlora_watch_lost_events_total", None] == 0
    assert {family.documentation for family in families}.isdisjoint({""})


def test_too_many_and_slow_viewers_are_closed_and_cost_nothing_else(tmp_path: Path) -> None:
    with site(tmp_path) as running, ExitStack() as stack:
        limit = page_module._Connection.max_connections
        address = ("127.0.0.1", int(running.url.split(":")[2].strip("/")))
        record = running.begin(clip=lambda begin, end: bytes(20_000_000))
        slow = stack.enter_context(socket.create_connection(address))
        slow.sendall(f"GET /events/{record['clip']} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        others = [stack.enter_context(socket.create_connection(address)) for _ in range(limit + 20)]
        for one in others:
            one.settimeout(60)
        # The last ones are closed without an answer; one that leaves makes room.
        assert all(_is_closed(one) for one in others[limit:])
        others[0].close()
        until(lambda: _state_is_served(running))
        assert running.begin(camera="yard")["camera"] == "yard"


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def _state_is_served(running: Site) -> bool:
    try:
        return running.get("state")[0] == 200
    except OSError:
        return False


def test_a_port_in_use_is_told(tmp_path: Path) -> None:
    with site(tmp_path) as running:
        port = running.url.split(":")[2].strip("/")
        with pytest.raises(ServerError, match=f"port {port} is already in use; .*--page"):
            WatchPage(PageOptions(listen=f"127.0.0.1:{port}"), list, running.desk)


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with browser() as started:
        yield started


@pytest.mark.parametrize("width", [360, 1280])
def test_a_browser_shows_cameras_events_and_clips(driver: Any, tmp_path: Path, width: int) -> None:
    with site(tmp_path) as running:
        running.cameras += [
            view("gate", picture=jpeg(1), answered=1.0, answer="a person", lag=0.25, chunks=3),
            view("yard", state="connecting", detail="no route to the camera"),
        ]
        video = mp4()
        running.begin("yes", picture=jpeg(2), clip=lambda begin, end: video)
        page = Page(driver, width)
        page.open(running.url.removeprefix("http://").strip("/"))
        page.wait("#status", "1 of 2 cameras running")
        running.cameras[0]["overloaded"] = True
        page.wait("#status", "1 of 2 cameras running, 1 overloaded")
        assert page.text("#cameras .state") == "overloaded"
        # Selenium's elements may be removed before their text is read.
        names = "return Array.from(document.querySelectorAll('#cameras .name'), (x) => x.innerText)"
        assert page.run(names) == ["gate", "yard"]
        assert page.text("#cameras .text") == "a person"
        page.wait("#cameras .detail", "no route to the camera")
        widths = "return [...document.images].map((one) => one.naturalWidth)"
        until(lambda: page.run(widths).count(96) == 2)
        whole = "return [...document.querySelectorAll('.frame img:not([hidden])')].every("
        whole += "(one) => one.offsetHeight <= one.parentElement.clientHeight)"
        assert page.run(whole), "pictures are cut off"
        page.wait("#events .name", "gate: people")
        # Seeking needs range requests.
        sought = page.run(
            "const video = document.querySelector('#events video'); video.preload = 'auto';"
            "await new Promise((done) => video.onloadeddata = done);"
            "const seeked = new Promise((done) => video.onseeked = done);"
            "video.currentTime = 3; await seeked; return [video.duration, video.currentTime]"
        )
        assert sought == [4, 3]
        player = page.find("#events video")
        running.cameras[0] |= {"answer": "nobody", "chunks": 4, "answered": 2.0, "picture": jpeg(3)}
        running.begin("yes", camera="yard")
        page.wait("#events li:first-child .name", "yard: people")
        page.wait("#cameras .text", "nobody")
        assert page.all("#events video")[1] == player, "an event that is shown stays as it is"
        assert page.run("return arguments[0].currentTime", player) == 3
        assert page.run("return document.documentElement.scrollWidth <= innerWidth"), "too wide"
        assert page.faults() == []
        del running.cameras[1]
        until(lambda: page.run(names) == ["gate"])
        driver.get("about:blank")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_accessible(driver: Any, tmp_path: Path, scheme: str) -> None:
    with site(tmp_path) as running:
        states = ("running", "connecting", "stopped")
        running.cameras += [view(state, state=state, detail="why", answer="x") for state in states]
        running.cameras[0] |= {"picture": jpeg(), "answer": "a long answer " * 100}
        running.begin(picture=jpeg(), clip=lambda begin, end: b"x")
        page = Page(driver, 1280)
        page.scheme(scheme)
        page.open(running.url.removeprefix("http://").strip("/"))
        page.wait("#events .name", "people")
        assert barriers(page) == []
        driver.get("about:blank")


def test_hostile_answers_are_text(driver: Any, tmp_path: Path) -> None:
    with site(tmp_path) as running:
        running.cameras.append(
            view(XSS, answer=XSS, detail=XSS, adapter=XSS, picture=jpeg(), answered=1.0)
        )
        running.begin(XSS, camera=XSS, rule=XSS[:90], picture=jpeg(), adapter=XSS)
        page = Page(driver, 1280)
        page.open(running.url.removeprefix("http://").strip("/"))
        page.wait("#events .text", "onerror")
        for selector in ("#cameras .name", "#cameras .text", "#cameras .detail", "#events .text"):
            assert page.text(selector) == XSS
        assert page.run("return document.title") == "V-LoRA watch"
        assert len(page.all("#cameras img")) == len(page.all("#events img")) == 1
        assert page.all("main script") == []
        assert page.faults() == []
        driver.get("about:blank")


def test_a_browser_finds_the_page_again(driver: Any, tmp_path: Path) -> None:
    with site(tmp_path / "a") as running:
        port = running.url.split(":")[2].strip("/")
        page = Page(driver, 360)
        page.open(f"127.0.0.1:{port}")
        page.wait("#status", "0 of 0 cameras running")
        page.wait("#no-events", "There are no events yet.")
    page.wait("#status", "No connection to vlora watch; trying again")
    with site(tmp_path / "b", listen=f"127.0.0.1:{port}"):
        page.wait("#status", "0 of 0 cameras running")
        driver.get("about:blank")
    page.faults()
