"""The server of the live page: one thread a connection, reads only, and one thing that can be asked for: stop.

The standard library's server is enough for the few people who watch a folder of runs, and needs no package.
"""

from __future__ import annotations

import errno
import gzip
import hmac
import ipaddress
import json
import re
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from .. import __version__
from ..core.errors import BadInput
from ..core.files import finite
from ..plots.style import DASHES
from ..report import page as report
from ..runs.read import DAMAGE
from ..simulate.recorder import STOP
from . import clients
from .answer import LiveAnswers
from .curves import POINTS
from .watch import PAUSE, Watch

LISTENERS = 32  # pages that follow at the same time
_REPORTED = 200  # runs in one report at most
_POINTS = 4000  # of a curve at most
_SMALL = 1000  # bytes that are not worth packing
_ALIVE = 15.0  # seconds after which a silent page is told that all is well
_TOKEN = re.compile(r"[A-Za-z0-9_-]{16,}")
_POLICY = "; ".join(f"{what} 'self'" for what in ("script-src", "style-src", "connect-src", "img-src"))
_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; {_POLICY} data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
# A report brings a stricter policy of its own, that names its script and style by their hashes.
_REPORT_HEADERS = {**_HEADERS, "Content-Security-Policy": "frame-ancestors 'none'"}
_SHARED = ("elements.js", "tables.js", "charts.js")  # with the report
_OWN = ("draw.js", "plot.js", "store.js", "curves.js", "answer.js", "list.js", "run.js", "live.js")


class Answer(NamedTuple):
    body: bytes
    kind: str
    status: int = 200
    headers: dict[str, str] = _HEADERS


class Refused(Exception):
    """A request that is not answered, and why."""

    def __init__(self, status: int, why: str):
        super().__init__(why)
        self.status = status


class LiveServer(ThreadingHTTPServer):
    """Listens at once; `serve_forever` answers."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, folder: str | Path, host: str = "127.0.0.1", port: int = 8765, token: str = ""):
        self.folder, self.host, self.token = Path(folder), host, token
        if not self.folder.is_dir():
            raise BadInput(f"there is no folder {folder}; name one that holds runs")
        family, where = _address(host, port)
        self.is_loopback = ipaddress.ip_address(where[0]).is_loopback
        if not self.is_loopback and not token:
            raise BadInput(
                f"--host {host} lets other machines in: give --token too, sixteen or more letters and digits"
            )
        if token and not _TOKEN.fullmatch(token):
            raise BadInput("--token should be sixteen or more letters, digits, - or _")
        self.watch, self.answers = Watch(self.folder), LiveAnswers()
        self.closed = threading.Event()
        self.listeners = threading.BoundedSemaphore(LISTENERS)
        self.reporting = threading.Lock()  # one report at a time: each is seconds of work
        self.address_family = family
        try:
            super().__init__(where, Handler)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise BadInput(f"--port {port} is taken; --port 0 takes a free one") from None
            raise BadInput(f"--host {host}, --port {port}: {error.strerror}") from None

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.server_address[1]}/" + (f"?token={self.token}" if self.token else "")

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # not HTTPServer's, which asks the network for a name
        self.server_name, self.server_port = self.host, self.server_address[1]

    def server_close(self) -> None:
        self.closed.set()  # pages that follow are let go
        super().server_close()

    def knows(self, name: str) -> bool:
        """Whether a Host header is ours. Of others, only addresses: a foreign name may be made to point here."""
        if name in ("localhost", self.host.lower()):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return not self.is_loopback and name == socket.gethostname().lower()
        return address.is_loopback or not self.is_loopback

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A page that went away is no trouble; anything else is a bug, and is shown as one."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def _address(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, OverflowError, UnicodeError):
        raise BadInput(f"--host {host} is no address of this machine; 127.0.0.1 is the usual one") from None
    return family, (str(where[0]), int(where[1]))


class Handler(BaseHTTPRequestHandler):
    server: LiveServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds without a request

    def do_GET(self) -> None:
        self._answer(_GET)

    def do_POST(self) -> None:
        self.close_connection = True  # what a body holds is never read
        self._answer(_POST)

    def _refuse_method(self) -> None:
        self.close_connection = True
        self._refuse(405, "This page can be read, and runs can be stopped; nothing else.")

    do_HEAD = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _refuse_method

    # ---- who may ask ----
    def _answer(self, routes: dict[str, Callable[[LiveServer, dict[str, list[str]]], Answer]]) -> None:
        try:
            self._check_origin(writes=routes is _POST)
            path, words = self._asked()
            token = self._check_token(words)
            if path == "/events" and routes is _GET:
                return self._follow()
            if path not in routes:
                known = path in _GET or path in _POST
                raise Refused(405 if known else 404, "There is nothing to be had here.")
            answer = _patiently(lambda: routes[path](self.server, words))
            self._send(answer._replace(headers={**answer.headers, **token}))
        except Refused as refusal:
            self._refuse(refusal.status, str(refusal))
        except BadInput as error:
            self._refuse(400, str(error))

    def _asked(self) -> tuple[str, dict[str, list[str]]]:
        if not self.path.startswith("/") or self.path.startswith("//"):
            raise Refused(400, "Only paths of this page are answered.")
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # or the body would be taken for the next request
        try:
            path, query = self.path.partition("?")[::2]
            return path, parse_qs(query, max_num_fields=4 * _REPORTED, errors="strict")
        except ValueError:
            raise Refused(400, "The question cannot be read.") from None

    def _check_origin(self, *, writes: bool) -> None:
        """Pages of others may neither read nor stop anything, whatever name they make point to this machine."""
        hosts = self.headers.get_all("Host", [])
        try:
            name = urlsplit(f"//{hosts[0]}").hostname if len(hosts) == 1 else None
        except ValueError:
            name = None
        if not name or not self.server.knows(name):
            raise Refused(403, "This page is not known by that name; open it by its address.")
        origin = self.headers.get("Origin")
        if origin is not None and origin not in (f"http://{hosts[0]}", f"https://{hosts[0]}"):
            raise Refused(403, "Another site's page has asked for this.")
        if writes and origin is None:
            raise Refused(403, "Only the page itself can stop a run.")
        site = self.headers.get("Sec-Fetch-Site", "none")
        arrives = self.headers.get("Sec-Fetch-Mode") == "navigate" and self.path.partition("?")[0] == "/"
        if site not in ("same-origin", "none") and not arrives:
            raise Refused(403, "Another site's page has asked for this.")

    def _check_token(self, words: dict[str, list[str]]) -> dict[str, str]:
        """Headers that let the page go on without the token in its address."""
        if not (token := self.server.token):
            return {}
        cookie = f"fedlens-{self.server.server_address[1]}"
        offered = [
            *words.get("token", ()),
            self.headers.get("Authorization", "").removeprefix("Bearer "),
            *(part.strip().removeprefix(f"{cookie}=") for part in self.headers.get("Cookie", "").split(";")),
        ]
        if not any([hmac.compare_digest(each.encode(), token.encode()) for each in offered]):  # all, in constant time
            raise Refused(401, "Open the address that `fedlens ui` printed, with its token.")
        return {"Set-Cookie": f"{cookie}={token}; HttpOnly; SameSite=Strict; Path=/"} if "token" in words else {}

    # ---- answers ----
    def _follow(self) -> None:
        """Server-sent events: all runs, then those that change."""
        if not self.server.listeners.acquire(blocking=False):
            raise Refused(503, "Too many pages follow these runs already.")
        try:
            self.close_connection = True
            self._head(200, {**_HEADERS, "Content-Type": "text/event-stream; charset=utf-8", "Connection": "close"})
            version, silent = 0, 0.0
            while not self.server.closed.is_set():
                news = self.server.watch.since(version)
                if news["runs"] or news["gone"] or not silent:
                    self._write(f"data: {_json({**news, 'all': version == 0})}\n\n".encode())
                    silent = time.monotonic()
                elif time.monotonic() - silent > _ALIVE:
                    self._write(b": all is well\n\n")
                    silent = time.monotonic()
                version = news["version"]
                self.server.closed.wait(0.01 if news["more"] else PAUSE)  # others may ask in between
        finally:
            self.server.listeners.release()

    def _write(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()

    def _send(self, answer: Answer) -> None:
        body, packed = answer.body, {}
        if len(body) > _SMALL and answer.kind != "image/png" and "gzip" in self.headers.get("Accept-Encoding", ""):
            body, packed = gzip.compress(body, 4), {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
        kind = {"Content-Type": answer.kind, "Content-Length": str(len(body))}
        self._head(answer.status, {**answer.headers, **kind, **packed})
        self._write(body)

    def _refuse(self, status: int, why: str) -> None:
        self._send(Answer(_json({"error": why}).encode(), "application/json", status))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the standard library refuses by itself, in the same form."""
        self.close_connection = True
        self._refuse(int(code), message or "This cannot be answered.")

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if self.close_connection and "Connection" not in headers:
            self.send_header("Connection", "close")
        self.end_headers()

    def version_string(self) -> str:
        return "FedLens"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: an address may hold the token."""


# ---- what can be asked for -------------------------------------------------------------------------------------------
def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _as_json(value: Any) -> Answer:
    return Answer(_json(value).encode(), "application/json")


def _patiently(ask: Callable[[], Answer]) -> Answer:
    """Parts of a table may be merged while it is read."""
    for _ in range(3):
        try:
            return ask()
        except FileNotFoundError:
            time.sleep(0.05)
        except DAMAGE as error:
            raise BadInput(f"the run's files are damaged ({type(error).__name__}: {error})") from None
    raise BadInput("the run's files have changed while they were read; try again")


def _one(words: dict[str, list[str]], name: str) -> str:
    if len(found := words.get(name, [])) != 1:
        raise BadInput(f"one {name}= is needed")
    return found[0]


def _number(words: dict[str, list[str]], name: str, default: int = 0) -> int:
    return _numbers(words, name, default)[0]


def _numbers(words: dict[str, list[str]], name: str, default: int = 0) -> list[int]:
    """All that are given, or the default once."""
    for text in (texts := words.get(name, [str(default)])):
        if not re.fullmatch(r"[0-9]{1,9}", text):
            raise BadInput(f"{name} is {text!r}, but it should be a number")
    return [int(text) for text in texts]


def _several(words: dict[str, list[str]], what: str) -> list[str]:
    """Names of runs, each once."""
    names = list(dict.fromkeys(words.get("run", ())))
    if not 0 < len(names) <= _REPORTED:
        raise BadInput(f"{what} 1 to {_REPORTED} runs, not {len(names)}")
    return names


def _how(words: dict[str, list[str]]) -> dict[str, Any]:
    """How many points, of which rounds, and whether bytes are asked for."""
    most, window = _number(words, "points", POINTS), None
    if not 4 <= most <= _POINTS:
        raise BadInput(f"points is {most}, but it should be 4 to {_POINTS}")
    if "from" in words:
        window = _number(words, "from"), _number(words, "to")
    return {"most": most, "window": window, "spent": "bytes" in words}


def _page(server: LiveServer, words: dict[str, list[str]]) -> Answer:
    content = report.inert({"version": __version__, "folder": str(server.folder), "dashes": DASHES})
    return Answer(_asset("page.html").replace("{content}", content).encode(), "text/html; charset=utf-8")


def _asset(name: str) -> str:
    return (resources.files("fedlens.ui") / "assets" / name).read_text("utf-8")


def _style(server: LiveServer, words: dict[str, list[str]]) -> Answer:
    return Answer(f"{report.style_sheet()}\n{_asset('live.css')}".encode(), "text/css; charset=utf-8")


def _icon(server: LiveServer, words: dict[str, list[str]]) -> Answer:
    return Answer(_asset("icon.svg").encode(), "image/svg+xml")


def _script(server: LiveServer, words: dict[str, list[str]]) -> Answer:
    shared, own = [report.asset(name) for name in _SHARED], [_asset(name) for name in _OWN]
    text = "\n".join([*shared, "{", *own, "}"])  # in a block: names of the report's scripts may be taken again
    return Answer(text.encode(), "text/javascript; charset=utf-8")


def _curves(server: LiveServer, words: dict[str, list[str]]) -> Answer:
    """Of some runs: `after` and `generation` stand once for each of them, or not at all."""
    names = _several(words, "curves are of")
    known = [_numbers(words, name) for name in ("after", "generation")]
    known = [each * len(names) if len(each) == 1 else each for each in known]
    if any(len(each) != len(names) for each in known):
        raise BadInput("after and generation should stand once for each run")
    return _as_json(server.watch.curves(dict(zip(names, zip(*known, strict=True), strict=True)), **_how(words)))


def _means(server: LiveServer, words: dict[str, list[str]]) -> Answer:
    return _as_json(server.watch.means(_several(words, "means are over"), **_how(words)))


def _settings(server: LiveServer, words: dict[str, list[str]]) -> Answer:
    return _as_json(server.watch.settings())


def _run(server: LiveServer, words: dict[str, list[str]]) -> Answer:
    run = server.watch.run(_one(words, "run"))
    about = {"notes": run.notes, "settings": run.settings(), "pictures": clients.pictures(run.path)}
    about |= {"privacy": run.safety()}
    return _as_json(finite({**about, "remarks": run.labels["notes"], "setbacks": run.setbacks()}))


def _log(server: LiveServer, words: dict[str, list[str]]) -> Answer:
    run = server.watch.run(_one(words, "run"))
    try:
        return _as_json({"lines": run.log_tail()})
    except FileNotFoundError:
        return _as_json({"lines": []})
    except (OSError, ValueError):
        raise BadInput("log.txt is damaged: it is not a regular file") from None


def _clients(server: LiveServer, words: dict[str, list[str]]) -> Answer:
    run = server.watch.run(_one(words, "run"))
    return _as_json(clients.clients(run.path, words.get("order", ["number"])[0], _number(words, "at")))


def _client(server: LiveServer, words: dict[str, list[str]]) -> Answer:
    return _as_json(clients.client(server.watch.run(_one(words, "run")).path, _number(words, "client")))


def _picture(server: LiveServer, words: dict[str, list[str]]) -> Answer:
    return Answer(clients.picture(server.watch.run(_one(words, "run")).path, _one(words, "name")), "image/png")


def _report(server: LiveServer, words: dict[str, list[str]]) -> Answer:
    """Written for whoever asks, and nowhere kept."""
    paths = [server.watch.run(name).path for name in _several(words, "a report is about")]
    with server.reporting:
        text = report.page(report.gather(paths))
    return Answer(text.encode(), "text/html; charset=utf-8", headers=_REPORT_HEADERS)


def _winner(server: LiveServer, words: dict[str, list[str]]) -> Answer:
    paths = {run.name: run.path for run in server.watch.known(_several(words, "an answer is about"))}
    return _as_json(finite(server.answers.about(dict(sorted(paths.items())))))  # equals in the report's order


def _stop(server: LiveServer, words: dict[str, list[str]]) -> Answer:
    run = server.watch.run(_one(words, "run"))
    if run.row["state"] != "running":
        raise BadInput(f"{run.name} is not running")
    (run.path / STOP).touch()
    return _as_json({"stopping": run.name})


_Routes = dict[str, Callable[[LiveServer, dict[str, list[str]]], Answer]]
_GET: _Routes = {
    "/": _page,
    "/live.css": _style,
    "/live.js": _script,
    "/icon.svg": _icon,
    "/curves": _curves,
    "/means": _means,
    "/settings": _settings,
    "/run": _run,
    "/log": _log,
    "/clients": _clients,
    "/client": _client,
    "/picture": _picture,
    "/report": _report,
    "/answer": _winner,
}
_POST: _Routes = {"/stop": _stop}
