"""Tests of how the playground asks about files, pictures, clips and frames of a camera."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tests.support.browser import Page
from tests.support.gateway import Gateway
from tests.support.playground import EXPECTED, content, example
from tests.support.polling import until
from tools.demo.show import SAMPLES

pytestmark = pytest.mark.slow

SENDING_FILES = """
    const bytes = Uint8Array.from(atob(arguments[0]), (char) => char.charCodeAt(0));
    const data = new DataTransfer();
    data.items.add(new File([bytes], "sent.png", {type: "image/png"}));
"""


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


def test_options_are_sent_and_markup_stays_text(page: Page) -> None:
    page.write("#question", "Say it.")
    page.click(".more summary")
    page.write("#choices", "<img src=x onerror=alert(1)>\n<b>bold</b>")
    page.click("#ask")
    assert page.answer() in ("<img src=x onerror=alert(1)>", "<b>bold</b>")
    assert page.all(".answer img") == page.all(".answer b") == []


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
