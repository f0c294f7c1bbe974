"""Prometheus metrics. Counters of the store, the encoder and the engine are read when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from featcache.server.service import Service

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)
_FAST = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1, 3, 10)


class Metrics:
    """What the routes observe, in a registry of its own; and what is read from the service at a scrape."""

    def __init__(self, service: Service) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "featcache_requests", "Requests by route and status.", ["route", "status"], registry=self.registry
        )
        self.latency = self._histogram(
            "featcache_request_seconds", "From request to last byte, of chats.", _SECONDS
        )
        self.ttft = self._histogram(
            "featcache_time_to_first_token_seconds", "From request to first token.", _SECONDS
        )
        self.inter_token = self._histogram("featcache_inter_token_seconds", "Between two tokens.", _FAST)
        self.queue = self._histogram("featcache_queue_seconds", "Waiting for the engine.", _SECONDS)
        self.encode = self._histogram(
            "featcache_encode_seconds", "Waiting for images to be encoded.", _SECONDS
        )
        self.prompt_tokens = self._counter("featcache_prompt_tokens", "Prompt tokens.")
        self.completion_tokens = self._counter("featcache_completion_tokens", "Generated tokens.")
        self.loop_lag = self._histogram(
            "featcache_event_loop_lag_seconds", "How late the event loop is.", _FAST
        )
        self.registry.register(_FromService(service))

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self.registry)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _FromService(Collector):
    """Everything that others count already."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def describe(self) -> list[Metric]:
        return []  # so that nothing is read before the first scrape

    def collect(self) -> Iterator[Metric]:
        stats = self._service.vlm.stats()
        yield from _tiers(stats["store"])
        yield from _store(stats["store"])
        yield from self._images()
        yield from self._engine(stats["encoder"], stats["engine"])

    def _images(self) -> Iterator[Metric]:
        savings = self._service.savings
        images = CounterMetricFamily(
            "featcache_images", "Images of answered requests, by where they came from.", labels=["tier"]
        )
        for tier in ("prefix", "device", "host", "disk", "encoded"):
            images.add_metric([tier], savings.images[tier])
        yield images
        yield _count("featcache_saved_seconds", "Seconds saved by hits (estimated).", savings.total_s)
        yield _count("featcache_cached_tokens", "Prompt tokens whose KV was held.", savings.cached_tokens)
        media = CounterMetricFamily(
            "featcache_media", "Images by URL, by what became of them.", labels=["outcome"]
        )
        for outcome, count in self._service.media.counts.items():
            media.add_metric([outcome], count)
        yield media

    def _engine(self, encoder: Mapping[str, Any], engine: Mapping[str, Any]) -> Iterator[Metric]:
        for name, value in encoder.items():
            if isinstance(value, (int, float)):
                yield _count(f"featcache_encoder_{name}", f"Encoder: {name.replace('_', ' ')}.", value)
        for name, value in engine.items():
            if isinstance(value, (int, float)):
                yield GaugeMetricFamily(
                    f"featcache_engine_{name}", f"Engine: {name.replace('_', ' ')}.", value
                )


def _tiers(store: Mapping[str, Any]) -> Iterator[Metric]:
    """Per tier: bytes of budget, entries, hits, evictions."""
    used = GaugeMetricFamily("featcache_tier_bytes", "Bytes in use.", labels=["tier"])
    limit = GaugeMetricFamily("featcache_tier_max_bytes", "Bytes allowed.", labels=["tier"])
    entries = GaugeMetricFamily("featcache_tier_entries", "Images held.", labels=["tier"])
    hits = CounterMetricFamily("featcache_tier_hits", "Look-ups answered.", labels=["tier"])
    evicted = CounterMetricFamily("featcache_tier_evictions", "Images evicted.", labels=["tier"])
    for tier in tiers(store):
        used.add_metric([tier["name"]], tier["used_bytes"])
        limit.add_metric([tier["name"]], tier["max_bytes"])
        entries.add_metric([tier["name"]], tier["entries"])
        hits.add_metric([tier["name"]], tier["hits"])
        evicted.add_metric([tier["name"]], tier["evictions"])
    yield from (used, limit, entries, hits, evicted)


def tiers(store: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tiers that are there, nearest first, each in the same words."""
    found = []
    for name in ("device", "host", "disk"):
        if (stats := store[name]) is not None:
            is_disk = name == "disk"
            found.append(
                {
                    "name": name,
                    "used_bytes": stats["file_bytes" if is_disk else "used_bytes"],
                    "max_bytes": stats["max_bytes"],
                    "entries": stats["entries" if is_disk else "num_entries"],
                    "hits": store[f"hits_{name}"],
                    "evictions": stats["evicted"],
                }
            )
    return found


def _store(store: Mapping[str, Any]) -> Iterator[Metric]:
    yield _count("featcache_misses", "Look-ups that no tier could answer.", store["misses"])
    yield _count("featcache_no_room", "Features that the host tier had no room for.", store["no_room"])
    yield _count("featcache_unwritten", "Features that didn't reach the disk.", store["unwritten"])
    yield GaugeMetricFamily(
        "featcache_backlog_bytes", "Bytes on their way to the host.", store["backlog_bytes"]
    )
    if (disk := store["disk"]) is not None:
        yield _count("featcache_quarantined", "Damaged records put aside.", disk["quarantined"])
        yield _count("featcache_disk_write_errors", "Writes that failed.", disk["write_errors"])
        yield GaugeMetricFamily(
            "featcache_disk_degraded", "1 while the disk takes no writes.", disk["is_degraded"]
        )
    if (writer := store["writer"]) is not None:
        yield GaugeMetricFamily("featcache_write_queue", "Records that wait for the disk.", writer["waiting"])
        yield GaugeMetricFamily("featcache_write_queue_bytes", "Their bytes.", writer["waiting_bytes"])
        yield _count("featcache_write_dropped", "Records dropped as the queue was full.", writer["dropped"])


def _count(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value)
