"""Tests of the playground in a browser of several widths, with a server of the demo model."""

from __future__ import annotations

import base64
import json
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import Page, axe, browser
from tests.support.gateway import KEY, Gateway, running
from tests.support.polling import until
from tools.demo.__main__ import ADAPTERS
from tools.demo.show import SAMPLES
from vlora.launcher.server import ServerOptions, TritonServer
from vlora.vision.results import parse_boxes

pytestmark = pytest.mark.slow

WIDTHS = (360, 390, 768, 1280)
MODES = ("ask", "compare", "live")
EXPECTED = {entry["name"]: entry for entry in json.loads((SAMPLES / "index.json").read_text())}
ENDLESS = """
    const send = window.fetch;
    window.fetch = (path, options) => send(path, !options.body ? options :
      {...options, body: JSON.stringify({...JSON.parse(options.body), ignore_eos: true})});
"""
"""Makes every answer as long as `max_tokens`, so that a test can act within it."""

SENDING_FILES = """
    const bytes = Uint8Array.from(atob(arguments[0]), (char) => char.charCodeAt(0));
    const data = new DataTransfer();
    data.items.add(new File([bytes], "sent.png", {type: "image/png"}));
"""


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the demo's adapters, which a test may break."""
    return Path(shutil.copytree(ADAPTERS, tmp_path_factory.mktemp("demo") / "adapters"))


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def demo_server(
    driver: Any, adapters: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    log = tmp_path_factory.mktemp("playground-server") / "tritonserver.log"
    with TritonServer(ServerOptions(adapters=adapters, log=log)) as server:
        yield server


@pytest.fixture(scope="module")
def gateway(
    demo_server: TritonServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("playground")
    options = ("--metrics-url", demo_server.metrics_url)
    with running(demo_server.grpc_url, folder, *options) as started:
        yield started


@pytest.fixture(params=WIDTHS)
def page(driver: Any, gateway: Gateway, request: pytest.FixtureRequest) -> Iterator[Page]:
    """Yield the loaded page. Its console must show no messages that a test has not read."""
    page = Page(driver, request.param)
    page.open(gateway.address)
    page.wait("#status", "7 adapters")
    yield page
    assert page.faults() == []
    assert page.run("return document.documentElement.scrollWidth <= innerWidth"), "too wide"
    page.driver.get("about:blank")


def example(page: Page, name: str) -> None:
    page.wait(f"[data-example={name}]")
    page.click(f"[data-example={name}]")


def content(name: str) -> str:
    """Return a sample's file in base64."""
    return base64.b64encode((SAMPLES / f"{name}.png").read_bytes()).decode()


def test_a_chosen_file_is_asked_about_and_its_answer_streams_in(page: Page) -> None:
    page.find("#file").send_keys(str(SAMPLES / "caption.png"))
    page.wait("#about", "caption.png, 256 × 256")
    page.choose(".column-a .task", "caption")
    page.run("""
        window.seen = new Set();
        new MutationObserver(([{target}]) => seen.add(target.textContent.length))
          .observe(document.querySelector(".answer"), {childList: true});
    """)

    def came_in_pieces() -> bool:
        """Ask. A busy server may send all tokens at once."""
        page.click("#ask")
        assert page.answer() == EXPECTED["caption"]["expected"]
        return bool(page.run("return seen.size > 1"))

    until(came_in_pieces)
    page.wait(".column-a .meta", "caption")
    assert EXPECTED["caption"]["expected"] in page.find("#announcer").get_attribute("textContent")


def test_boxes_are_drawn_where_the_answer_says(page: Page) -> None:
    example(page, "defects")
    page.answer()
    text = page.run("""
        const {parseAnswer} = await import("/playground/boxes.js");
        return document.querySelector(".answer .box").textContent;
    """)
    (found,), _ = parse_boxes(f"<ref>stain</ref><box>{text}</box>")
    picture, box = (page.find(selector).rect for selector in (".figure img", ".layer .box"))
    assert page.text(".layer .box span") == "stain"
    drawn = (
        (box["x"] - picture["x"]) / picture["width"],
        (box["y"] - picture["y"]) / picture["height"],
        (box["x"] + box["width"] - picture["x"]) / picture["width"],
        (box["y"] + box["height"] - picture["y"]) / picture["height"],
    )
    assert drawn == pytest.approx([edge / 1000 for edge in found.grid], abs=0.01)


def test_labels_of_boxes_stay_within_the_picture(page: Page) -> None:
    name = "a thing with a name that is longer than half of the picture"
    boxes = ("(900,500),(990,600)", "(20,5),(90,60)", "(820,5),(990,60)", "(510,300),(560,350)")
    example(page, "detect")
    page.answer()
    page.click(".more summary")
    page.write("#choices", f"<ref>{name}</ref>" + "".join(f"<box>{box}</box>" for box in boxes))
    page.click("#ask")
    page.answer()
    picture = page.find(".figure img").rect
    labels = [label.rect for label in page.all(".layer .box span")]
    assert len(labels) == len(boxes)
    for label in labels:
        assert picture["x"] <= label["x"] + 4
        assert label["x"] + label["width"] <= picture["x"] + picture["width"] + 4


def test_chosen_options_are_not_cut_off(page: Page) -> None:
    """Compare the width of the text with that of the field, less its arrow (20 pixels)."""
    page.mode("compare")
    example(page, "action")
    page.answer("b")
    assert [one.text for one in page.all("legend")][1:] == ["Model A", "Model B"]
    for mode in ("compare", "ask"):
        page.mode(mode)
        page.choose(".column-a .task", "detect")
        cut = page.run("""
            const context = document.createElement("canvas").getContext("2d");
            return [...document.querySelectorAll("select")].filter((one) => {
              const {font, paddingLeft, paddingRight} = getComputedStyle(one);
              context.font = font;
              const text = context.measureText(one.selectedOptions[0].textContent).width;
              const edges = parseFloat(paddingLeft) + parseFloat(paddingRight) + 20;
              return one.clientWidth && text + edges > one.clientWidth;
            }).map((one) => one.selectedOptions[0].textContent);
        """)
        assert cut == [], mode


def test_answers_are_split_as_the_server_splits_them(page: Page) -> None:
    rng = random.Random(7)
    words = [
        "<ref>",
        "</ref>",
        "<box>",
        "</box>",
        "(1,2),(30,4)",
        "(999,0) (5,7)",
        "(1000,1),(2,3)",
    ]
    words += [" cat ", "é<", "<re", "\n", "(7,8)"]
    texts = ["".join(rng.choices(words, k=rng.randint(1, 9))) for _ in range(400)]
    answers = page.run(
        """
        const {parseAnswer} = await import("/playground/boxes.js");
        return arguments[0].map((text) => parseAnswer(text).boxes);
        """,
        texts,
    )
    for text, boxes in zip(texts, answers, strict=True):
        expected = [(box.label, list(box.grid)) for box in parse_boxes(text)[0]]
        assert [(box["label"], box["grid"]) for box in boxes] == expected, text


def test_the_scores_of_a_head_are_bars(page: Page) -> None:
    example(page, "textures")
    assert page.answer() == "zigzag"
    rows = page.all("#answers .scores li")
    shares = [float(row.text.split()[-2]) for row in rows]
    assert len(rows) == 6
    assert rows[0].text.startswith("zigzag")
    assert sum(shares) == pytest.approx(100, abs=0.5)
    track, fill = (page.find(f".scores .bar-{part}").rect["width"] for part in ("track", "fill"))
    assert fill / track == pytest.approx(shares[0] / 100, abs=0.02)


def test_pictures_are_dropped_and_pasted(page: Page) -> None:
    page.run(
        SENDING_FILES + 'document.dispatchEvent(new DragEvent("drop", {dataTransfer: data}));',
        content("detect"),
    )
    page.wait("#about", "sent.png, 256 × 256")
    page.click("#clear")
    page.wait("#empty")
    page.run(
        SENDING_FILES
        + 'document.dispatchEvent(new ClipboardEvent("paste", {clipboardData: data}))',
        content("detect"),
    )
    page.wait("#about", "sent.png, 256 × 256")
    page.run(
        SENDING_FILES + 'document.dispatchEvent(new DragEvent("drop", {dataTransfer: data}));',
        "AAAA",
    )
    page.wait("#picture-error", "sent.png cannot be read as a picture.")


def test_the_camera_takes_a_picture(page: Page) -> None:
    page.click("#camera")
    page.wait("#about", "Camera, 640 × 480")
    page.click("#snap")
    page.wait(".figure img")
    page.wait("#about", "camera picture, 640 × 480")
    page.choose(".column-a .task", "classify")
    page.click("#ask")
    assert page.answer()


def test_a_clip_is_sent_as_frames(page: Page) -> None:
    example(page, "action")
    assert page.answer() == EXPECTED["action"]["expected"]
    assert len(page.all(".figure img")) == 6


def test_two_adapters_answer_about_one_picture(page: Page) -> None:
    page.mode("compare")
    example(page, "digits")
    assert page.answer("a") == EXPECTED["digits"]["expected"]
    assert page.answer("b") != EXPECTED["digits"]["expected"]
    page.choose(".column-a .adapter", "defects")
    page.choose(".column-a .task", "detect")
    example(page, "detect")
    page.answer("b")
    page.choose(".column-b .adapter", "defects")
    page.choose(".column-b .task", "detect")
    page.write("#question", "square")
    page.click("#ask")
    until(lambda: page.all(".layer .box-a") and page.all(".layer .box-b"))


def test_the_keyboard_is_enough(page: Page) -> None:
    page.write("#question", "What color is the star?")
    page.find("#file").send_keys(str(SAMPLES / "vqa.png"))
    page.wait(".figure img")
    page.run('document.querySelector("input[name=mode]:checked").focus()')
    page.press("ARROW_RIGHT")
    assert page.run("return document.querySelector('input[name=mode]:checked').value") == "compare"
    page.press("ARROW_LEFT")
    reached = set()
    for _ in range(40):
        page.press("TAB")
        focus = page.run("return document.activeElement.id || document.activeElement.className")
        reached.add(focus)
    assert {"file", "camera", "clear", "adapter", "task", "question", "ask", "answer"} <= reached
    page.run("document.querySelector('#question').focus()")
    page.press("CONTROL", "ENTER")
    assert page.answer() == "blue"


def test_options_are_sent_and_markup_stays_text(page: Page) -> None:
    page.write("#question", "Say it.")
    page.click(".more summary")
    page.write("#choices", "<img src=x onerror=alert(1)>\n<b>bold</b>")
    page.click("#ask")
    assert page.answer() in ("<img src=x onerror=alert(1)>", "<b>bold</b>")
    assert page.all(".answer img") == page.all(".answer b") == []


def test_nothing_is_loaded_from_elsewhere(page: Page, gateway: Gateway) -> None:
    example(page, "vqa")
    page.answer()
    names = page.run("return performance.getEntriesByType('resource').map(({name}) => name)")
    assert names
    assert all(name.startswith((f"http://{gateway.address}/", "data:")) for name in names)


def test_an_error_of_an_adapter_is_shown(page: Page, adapters: Path) -> None:
    page.choose(".column-a .adapter", "glyphs")
    page.write("#question", "What symbol is this?")
    config = adapters / "glyphs" / "adapter_config.json"
    before = config.read_text()
    try:
        config.write_text("{")

        def failure() -> str:
            page.click("#ask")
            until(lambda: page.text(".meta") or page.text(".failure"))
            return page.text(".failure")

        text = until(failure)
        assert "The request is wrong" in text
        assert "adapter 'glyphs': adapter_config.json is not valid JSON" in text
        assert "INVALID_ARG" in text
        assert page.all(".failure button") == [], "to ask again would not help"
        page.wait("#status", "6 adapters")
        assert "glyphs (no longer known)" in page.text(".adapter")
    finally:
        config.write_text(before)
    assert all("status of 400" in fault for fault in page.faults())
    page.wait("#status", "7 adapters")
    page.click("#ask")
    assert page.answer()


@pytest.mark.parametrize("width", WIDTHS)
def test_a_server_that_is_dropped_is_found_again(
    driver: Any, demo_server: TritonServer, tmp_path: Path, width: int
) -> None:
    """Kill the gateway in the middle of an answer, start it again, and ask again."""
    page = Page(driver, width)
    with running(demo_server.grpc_url, tmp_path) as first:
        page.open(first.address)
        page.wait("#status", "Connected")
        page.click(".more summary")
        page.write("#max-tokens", "900")
        page.write("#question", "What is it?")
        page.run(ENDLESS)
        page.click("#ask")
        until(lambda: page.text(".answer"))
        first.kill()
    page.wait(".failure button", "Try again")
    assert page.text(".failure strong") == "The answer broke off"
    assert page.text(".answer"), "what has come stays"
    page.wait("#status", "No connection to the gateway; trying again")
    port = int(first.address.rpartition(":")[2])
    with running(demo_server.grpc_url, tmp_path, port=port):
        page.wait("#status", "Connected")
        page.click(".failure button")
        page.answer()
        assert not page.find(".failure").is_displayed()
        assert all("net::ERR" in fault for fault in page.faults())
        driver.get("about:blank")


def test_a_gateway_without_a_server_says_so(driver: Any, tmp_path: Path) -> None:
    with running("127.0.0.1:9", tmp_path) as gateway:
        page = Page(driver, WIDTHS[0])
        page.open(gateway.address)
        page.wait("#status", "The server is not available; trying again")
        page.faults()
        driver.get("about:blank")


def test_a_key_is_asked_for_and_kept_in_memory_only(
    driver: Any, demo_server: TritonServer, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice {KEY}\n")
    with running(demo_server.grpc_url, tmp_path, "--keys", str(keys)) as gateway:
        page = Page(driver, WIDTHS[0])
        page.open(gateway.address)
        page.wait("#status", "Enter an API key")
        form = page.find("#key-form").rect
        assert 0 <= form["x"] <= form["x"] + form["width"] <= WIDTHS[0]
        page.write("#key", "another-key-that-is-wrong")
        page.press("ENTER")
        page.wait("#status", "The API key is not known")
        page.write("#key", KEY)
        page.press("ENTER")
        page.wait("#status", "7 adapters")
        example(page, "vqa")
        assert page.answer() == "blue"
        kept = page.run(
            "return [location.href, document.cookie, {...localStorage},"
            " {...sessionStorage}, document.documentElement.outerHTML]"
        )
        assert KEY not in json.dumps(kept)
        assert page.find("#key").get_property("value") == ""
        assert all("status of 401" in fault for fault in page.faults())
        driver.get("about:blank")


def test_live_frames_supersede_each_other(page: Page, gateway: Gateway) -> None:
    """Load the server by other requests, so that frames wait and newer ones supersede them."""
    page.mode("live")
    page.find("#live-rate").send_keys("20")
    page.choose(".column-a .adapter", "textures")
    done = False

    def load() -> None:
        url = f"data:image/png;base64,{content('caption')}"
        part = {"type": "image_url", "image_url": {"url": url}}
        while not done:
            gateway.client.chat.completions.create(
                model="base",
                messages=[{"role": "user", "content": [part, {"type": "text", "text": ""}]}],
                extra_body={"task": "caption"},
            )

    def number(name: str) -> int:
        rows = page.run(
            "return [...document.querySelectorAll('#live-frames div, #live-server div')]"
            ".map((row) => [...row.children].map((part) => part.textContent))"
        )
        return next((int(value) for label, value in rows if label.startswith(name)), 0)

    with ThreadPoolExecutor(8) as pool, ExitStack() as stack:
        page.click("#live-start")
        until(lambda: number("Answered") > 3)
        for _ in range(8):
            pool.submit(load)

        def end() -> None:
            nonlocal done
            done = True

        stack.callback(end)
        until(lambda: number("Dropped") > 0 and number("Superseded") > 0)
    page.click("#live-stop")
    modes = {row.text.split()[0] for row in page.all("#live-modes li")}
    assert modes == {"unmerged", "mixture", "merged"}
    assert len(page.all("#answers .scores li")) == 6
    assert "Requests waiting" in page.text("#live-server")
    assert page.find("#spark-line").get_attribute("points").count(",") > 3
    assert number("Failed") == 0
    page.click("#clear")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_accessible(page: Page, scheme: str) -> None:
    page.run(axe().read_text())
    page.scheme(scheme)

    def check() -> None:
        violations = page.run("return (await axe.run()).violations")
        found = [
            (one["id"], node["html"], node["failureSummary"])
            for one in violations
            if one["impact"] in ("serious", "critical")
            for node in one["nodes"]
        ]
        assert found == []

    for mode in MODES:
        page.mode(mode)
        check()
    page.mode("compare")
    example(page, "defects")
    page.answer()
    example(page, "digits")
    page.answer()
    page.click("#key-panel summary")
    check()
    page.click("#key-panel summary")
    page.click(".more summary")
    page.write("#max-tokens", "99999999999")
    page.run("document.querySelector('#ask-form').noValidate = true")
    page.click("#ask")
    page.wait(".failure")
    check()
    page.faults()
