"""Real servers for the server's tests: one that serves images, and featcache itself."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from types import TracebackType
from typing import Any

from PIL import Image

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
