"""The live page, served and opened: what its browser tests share."""

from __future__ import annotations

import threading
from pathlib import Path

from browser import Chromium, Page
from fedlens.ui.server import LiveServer

SIZES = {"laptop": (1280, 800, False), "phone": (360, 740, True)}
NAMES = "[...document.querySelectorAll('.runs .name')].map((e) => e.textContent)"


class serving:
    """A server of this folder while the `with` block lasts."""

    def __init__(self, folder: Path, port: int = 0, token: str = ""):
        self.server = LiveServer(folder, port=port, token=token)

    def __enter__(self) -> LiveServer:
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self.server

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


def address(server: LiveServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}/"


def opened(browser: Chromium, server: LiveServer, size: str = "laptop", more: str = "", dark: bool = False) -> Page:
    width, height, phone = SIZES[size]
    page = browser.open(address(server) + more, width, height, phone=phone, dark=dark)
    page.until("document.querySelector('.runs tbody tr, .bar svg') !== null")
    calm(page)
    return page


def calm(page: Page) -> None:
    """Until the answer is there, which may move what is below it."""
    page.until("document.querySelector('#answer[aria-busy]') === null", 90)


def quiet(page: Page, server: LiveServer) -> bool:
    return page.errors == [] and all(each.startswith(address(server)) for each in page.requests)
