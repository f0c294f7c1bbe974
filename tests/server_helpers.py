"""Real servers for the server's tests: one that serves images, and featcache itself."""

from __future__ import annotations

import base64
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import uvicorn
from PIL import Image

if TYPE_CHECKING:
    from featcache.engine.vlm import CachedVLM
    from featcache.server.service import Service

Route = Callable[[BaseHTTPRequestHandler], None]


def png(color: tuple[int, int, int] = (200, 30, 30), size: tuple[int, int] = (56, 56)) -> bytes:
    """A picture of one colour with a darker corner, so that upside down is another one."""
    image = Image.new("RGB", size, color)
    image.paste(tuple(c // 2 for c in color), (0, 0, size[0] // 3 + 1, size[1] // 3 + 1))
    out = BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


class ImageServer:
    """An HTTP server in a thread. `routes`: path -> handler; `hits`: requests by path."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.routes: dict[str, Route] = {}
        self.hits: Counter[str] = Counter()
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.released = threading.Event()  # handlers that stall wait for it
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                outer.hits[path] += 1
                outer.requests.append((self.path, {k.lower(): v for k, v in self.headers.items()}))
                route = outer.routes.get(path)
                if route is None:
                    send(self, b"not here", status=404, content_type="text/plain")
                else:
                    route(self)

            def log_message(self, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 256

            def handle_error(self, *args: Any) -> None:
                pass  # a client that went away is what the tests are about

        self._server = Server((address, 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self.address, self.port = address, self._server.server_address[1]

    def url(self, path: str, host: str | None = None) -> str:
        return f"http://{host or self.address}:{self.port}{path}"

    def image(self, path: str, data: bytes, **headers: str) -> str:
        """Serve `data` at `path`; returns its URL."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.routes[path] = lambda request: send(request, data, headers=named)
        return self.url(path)

    def __enter__(self) -> ImageServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def send(
    request: BaseHTTPRequestHandler,
    data: bytes,
    *,
    status: int = 200,
    content_type: str | None = "image/png",
    headers: dict[str, str] | None = None,
) -> None:
    request.send_response(status)
    if content_type is not None:
        request.send_header("Content-Type", content_type)
    for name, value in (headers or {}).items():
        request.send_header(name, value)
    request.send_header("Content-Length", str(len(data)))
    request.end_headers()
    request.wfile.write(data)


def redirect(location: str) -> Route:
    return lambda request: send(request, b"", status=302, headers={"Location": location})


def data_uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def user(text: str, *images: str | dict[str, Any]) -> dict[str, Any]:
    """A user's message: images (URLs, or whole parts), then text."""
    parts = [{"type": "image_url", "image_url": {"url": i}} if isinstance(i, str) else i for i in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


class ChatServer:
    """featcache's server in this process, on a real socket, in a thread. The model is closed with it."""

    def __init__(self, open_vlm: Callable[[], CachedVLM], **settings: Any) -> None:
        from featcache.server.app import create_app
        from featcache.server.settings import ServerSettings

        self.app = create_app(open_vlm, ServerSettings(port=0, **settings))
        config = uvicorn.Config(
            self.app, port=0, log_config=None, access_log=False, timeout_graceful_shutdown=5
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def service(self) -> Service:
        service: Service = self.app.state.service
        return service

    def __enter__(self) -> Self:
        self._thread.start()
        while not (self._server.started and self.app.state.service):
            assert self._thread.is_alive(), "the server doesn't start"
            threading.Event().wait(0.02)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join()


class ServeCommand:
    """`featcache serve` as its users start it: a process of its own."""

    def __init__(self, model: str, store: Path, *arguments: str) -> None:
        command = [
            str(Path(sys.executable).with_name("featcache")),
            "serve",
            model,
            "--store",
            str(store),
            "--port",
            "0",
        ]
        self.process = subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._ready, self._listening = threading.Event(), threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if match := re.search(r"listening on (http://\S+)", line):
                self.url = match[1]
                self._listening.set()
            if " ready: " in line:
                self._ready.set()
        self._ready.set()
        self._listening.set()

    def wait_ready(self, seconds: float = 120) -> None:
        assert self._listening.wait(seconds) and self._ready.wait(seconds), self.lines
        assert self.process.poll() is None, "".join(self.lines)

    def end(self, how: signal.Signals = signal.SIGTERM, seconds: float = 60) -> int:
        self.process.send_signal(how)
        status = self.process.wait(seconds)
        self._reader.join(5)
        return status

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(20)
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()
