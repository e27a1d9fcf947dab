"""Draw the documentation's pictures of the playground, with a server of the demo model.

usage: python -m tests.programs.playground_pictures
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

from PIL import Image

from tests.support.browser import Page, browser
from tests.support.gateway import running
from tests.support.polling import until
from vlora.launcher.server import TritonServer

PICTURES = Path(__file__).parents[2] / "docs" / "images"
ANSWERED = 40
"""Number of answers that the picture of the live mode shows."""

COUNT = "document.querySelector('#live-frames div:nth-child(2) dd')"
"""Element with the number of answers. The page replaces it when the number changes."""


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        TritonServer() as server,
        running(server.grpc_url, Path(folder), "--metrics-url", server.metrics_url) as gateway,
        browser() as driver,
    ):
        page = Page(driver, 1280)
        page.open(gateway.address)
        page.wait("#status", "7 adapters")
        page.resize(1280, 760)
        page.mode("compare")
        ask(page, "defects")
        page.answer("b")
        save(page, "playground")
        page.resize(360, 1180)
        page.scheme("dark")
        page.mode("ask")
        ask(page, "textures")
        page.run("document.querySelector('#ask-form').scrollIntoView()")
        save(page, "playground-phone")
        page.resize(768, 1000)
        page.scheme("light")
        page.mode("live")
        page.choose(".column-a .adapter", "textures")
        page.click("#live-start")
        until(lambda: int(page.run(f"return {COUNT}.textContent")) >= ANSWERED)
        page.run("scrollTo(0, document.querySelector('#live-frames').offsetTop - 420)")
        save(page, "playground-live")
        page.click("#live-stop")


def ask(page: Page, name: str) -> None:
    """Choose an example and wait for its answer."""
    page.wait(f"[data-example={name}]")
    page.click(f"[data-example={name}]")
    page.answer("a")
    page.run("document.activeElement.blur(); scrollTo(0, 0)")


def save(page: Page, name: str) -> None:
    """Write the visible part of the page."""
    shot = Image.open(io.BytesIO(page.driver.get_screenshot_as_png())).convert("RGB")
    path = PICTURES / f"{name}.png"
    shot.quantize(256, kmeans=4, dither=Image.Dither.NONE).save(path, optimize=True)
    print(path)


if __name__ == "__main__":
    main()
