"""Warming: encode whole image sets ahead of their use, at the speed of the tower, safe to stop any time."""

from __future__ import annotations

from featcache.engine.warm.items import PassedOver
from featcache.engine.warm.pipeline import WarmSettings
from featcache.engine.warm.report import Failure, Progress, WarmReport
from featcache.engine.warm.run import warm
from featcache.engine.warm.sources import Source

__all__ = ["Failure", "PassedOver", "Progress", "Source", "WarmReport", "WarmSettings", "warm"]
