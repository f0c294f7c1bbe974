"""`run_server`: the process around the app: sockets, signals, and an end in bounded time."""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI

from featcache.errors import ConfigError
from featcache.server.logs import set_up_logging
from featcache.server.settings import ServerSettings
from featcache.settings import store_path

if TYPE_CHECKING:
    from featcache.engine.vlm import CachedVLM

LOG = logging.getLogger("featcache.server")

CLOSE_S = 30.0  # for writing what is queued, after the last request


def run_server(model: str, settings: ServerSettings) -> int:
    """Serve until SIGTERM or SIGINT; the exit status.

    On the signal no new request is taken, those under way may finish within `drain_timeout`, what is queued
    for the disk is written, and the process ends, whatever still hangs.
    """
    set_up_logging(settings.log_level, as_json=settings.log_json)
    settings = dataclasses.replace(settings, store=store_path(settings.store))
    if (settings.ssl_certfile is None) != (settings.ssl_keyfile is None):
        raise ConfigError("--ssl-certfile and --ssl-keyfile go together")
    from featcache.server.app import create_app

    failures: list[BaseException] = []

    def failed(exc: BaseException) -> None:
        failures.append(exc)
        server.should_exit = True

    app = create_app(lambda: open_vlm(model, settings), settings, on_failure=failed)
    server = _Server(_config(app, settings), app, settings)
    server.run()
    LOG.info("ended")
    logging.shutdown()
    status = 1 if failures or not server.started else 0
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        os._exit(
            status
        )  # a name look-up or a half-loaded model can't be stopped, and must not hold up the end
    return status


def open_vlm(model: str, settings: ServerSettings) -> CachedVLM:
    """Load the model with the settings' store and limits. Takes seconds: call it in a thread."""
    from featcache.engine.engine import EngineSettings
    from featcache.engine.lmdeploy.engine import LMDeploySettings
    from featcache.engine.vlm import CachedVLM

    limits: dict[str, Any] = {"max_waiting": settings.max_waiting, "max_model_len": settings.max_model_len}
    is_native = settings.backend == "native"

    return CachedVLM.from_pretrained(
        model,
        store=settings.store,
        host_bytes=settings.host_bytes,
        disk_bytes=settings.disk_bytes,
        device_bytes=settings.device_bytes,
        device=settings.device,
        dtype=settings.dtype,
        compile_tower=settings.compile_tower,
        check=settings.check,
        backend="native" if is_native else "lmdeploy",
        settings=EngineSettings(**limits) if is_native else LMDeploySettings(tp=settings.tp, **limits),
    )


def _config(app: FastAPI, settings: ServerSettings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(settings.drain_timeout) + 1,
        timeout_keep_alive=30,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        backlog=1024,
    )


class _Server(uvicorn.Server):
    """uvicorn, with an end that is clean and bounded."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, settings: ServerSettings) -> None:
        super().__init__(config)
        self._app = app
        self._drain_s = settings.drain_timeout

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain; a second signal ends at once. uvicorn's own would die of the signal in the end."""
        if self.should_exit:
            self.force_exit = True
            return
        self.should_exit = self._app.state.draining = True
        LOG.info("shutting down: requests under way have %g s to finish", self._drain_s)
        last = threading.Timer(self._drain_s + 2 * CLOSE_S, os._exit, (1,))
        last.daemon = True
        last.start()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in self.servers:
            for bound in listener.sockets:
                host, port = bound.getsockname()[:2]
                scheme = "https" if self.config.is_ssl else "http"
                host = f"[{host}]" if ":" in host else host
                LOG.info("listening on %s://%s:%d", scheme, host, port)
