"""Widths, samples and steps of the playground's tests."""

from __future__ import annotations

import base64
import json

from tests.support.browser import Page
from tools.demo.show import SAMPLES

WIDTHS = (360, 390, 768, 1280)
"""Widths of the browser's window in pixels."""
EXPECTED = {entry["name"]: entry for entry in json.loads((SAMPLES / "index.json").read_text())}
"""Samples by name, with the answers of the demo model."""


def example(page: Page, name: str) -> None:
    """Click on one of the page's examples."""
    page.wait(f"[data-example={name}]")
    page.click(f"[data-example={name}]")


def content(name: str) -> str:
    """Return a sample's file in base64."""
    return base64.b64encode((SAMPLES / f"{name}.png").read_bytes()).decode()
