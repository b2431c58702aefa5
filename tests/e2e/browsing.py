"""Opens pages in a headless Chromium, and notes whatever it complains about."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
OPTIONS += ["--disable-component-update", "--disable-sync", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
PHONE, DESK = (390, 844), (1280, 900)


@contextmanager
def browse() -> Iterator[Any]:
    """A browser; skips the test where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright here: `make browser` installs it")
    if CHROMIUM is None:
        pytest.skip("no Chromium here: `make browser` installs it as root, or says how")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        browser.close()


class Visit:
    """One page, and what went wrong in it."""

    def __init__(self, browser: Any, url: str, size: tuple[int, int] = DESK, **options: Any) -> None:
        context = browser.new_context(viewport={"width": size[0], "height": size[1]}, **options)
        self.page = context.new_page()
        self.faults: list[str] = []
        self.page.on("console", lambda line: self.faults.append(f"{line.type}: {line.text}"))
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("requestfailed", self._note_failed)
        self.page.on("dialog", lambda dialog: self.faults.append(f"dialog: {dialog.message}"))
        self.page.on(
            "response", lambda answer: answer.status < 400 or self.faults.append(f"{answer.status}: {answer.url}")
        )
        self.page.goto(url, wait_until="domcontentloaded")

    def _note_failed(self, request: Any) -> None:
        if request.failure != "net::ERR_ABORTED":  # a page that is left gives up its stream
            self.faults.append(f"{request.failure}: {request.url}")

    def wait_for_text(self, where: str, words: str, timeout_s: float = 60.0) -> None:
        """Waits until an element has these words."""
        self.page.locator(where, has_text=words).first.wait_for(timeout=timeout_s * 1000, state="attached")

    def measure_overflow(self) -> int:
        """By how many pixels the page is wider than the window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    def list_wide(self) -> list[str]:
        """The tables that must be scrolled sideways."""
        script = "all => all.filter(e => e.parentNode.scrollWidth > e.parentNode.clientWidth + 1).map(e => e.innerText)"
        return list(self.page.locator("table").evaluate_all(script))

    def focus_next(self) -> str:
        """Presses Tab, and tells what has the focus then; it must be seen."""
        self.page.keyboard.press("Tab")
        return str(
            self.page.evaluate(
                """() => {
                  const e = document.activeElement, style = getComputedStyle(e);
                  if (e !== document.body && style.outlineStyle === "none") throw new Error("unseen: " + e.outerHTML);
                  return (e.getAttribute("aria-label") || e.textContent || e.tagName).trim();
                }"""
            )
        )
