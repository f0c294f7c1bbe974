"""Which addresses images may be fetched from, checked on the connection itself.

A name is resolved once; every address it has is checked, and one of those is connected to. So neither another
spelling of an address (2130706433, 127.1, ::ffff:127.0.0.1), nor a name that answers differently the second
time, nor a redirect gets past: what is checked is what is connected to.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import httpcore2 as httpcore

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

# IPv6 forms that carry an IPv4 address, and where: the address inside is what would be reached.
_CARRIERS = (
    (ipaddress.IPv6Network("::/96"), 0),  # IPv4-compatible, long deprecated
    (ipaddress.IPv6Network("::ffff:0:0/96"), 0),  # IPv4-mapped
    (ipaddress.IPv6Network("::ffff:0:0:0/96"), 0),  # IPv4-translated
    (ipaddress.IPv6Network("64:ff9b::/96"), 0),  # NAT64
    (ipaddress.IPv6Network("2002::/16"), 80),  # 6to4
)
# Ranges that Python's own tables miss in some of the versions we run on.
_NEVER = (
    ipaddress.IPv4Network("192.0.0.0/24"),  # protocol assignments
    ipaddress.IPv6Network("64:ff9b:1::/48"),  # NAT64 of one's own network
    ipaddress.IPv6Network("100::/64"),  # discard
    ipaddress.IPv6Network("2001::/23"),  # Teredo, ORCHID and other assignments
    ipaddress.IPv6Network("2001:db8::/32"),  # documentation
    ipaddress.IPv6Network("3fff::/20"),  # documentation
    ipaddress.IPv6Network("5f00::/16"),  # segment routing
    ipaddress.IPv6Network("fec0::/10"),  # site-local
    ipaddress.IPv4Network("192.88.99.0/24"),  # 6to4 relays
)


class AddressError(Exception):
    """A host that images may not be fetched from, or that has no address at all."""


def is_public(address: str) -> bool:
    """Whether an address, as the resolver writes it, is one of the public internet."""
    return _is_public(ipaddress.ip_address(address.partition("%")[0]))


def _is_public(address: IPAddress) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        for network, shift in _CARRIERS:
            if address in network:
                return _is_public(ipaddress.IPv4Address((int(address) >> shift) & 0xFFFF_FFFF))
    if any(address.version == network.version and address in network for network in _NEVER):
        return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


class CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Connections of httpcore, to allowed addresses only.

    Names are resolved in threads of its own, so that a slow name server holds up nothing else.
    """

    def __init__(self, is_allowed: Callable[[str], bool] = is_public) -> None:
        self._is_allowed = is_allowed
        self._plain = httpcore.AnyIOBackend()
        self._resolver = ThreadPoolExecutor(32, thread_name_prefix="featcache-resolver")

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            async with asyncio.timeout(timeout):
                addresses = await self._addresses(host, port)
        except TimeoutError as exc:
            raise httpcore.ConnectTimeout("name resolution") from exc
        failure: Exception = AddressError(host)
        for address in addresses[:4]:
            try:
                return await self._plain.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as exc:
                failure = exc
        raise failure

    async def _addresses(self, host: str, port: int) -> list[str]:
        """All addresses of a host, each allowed. Raises AddressError if there is none, or one is not."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(
                self._resolver, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            )
        except (OSError, UnicodeError, ValueError) as exc:
            raise AddressError(host) from exc
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        if not addresses or not all(map(self._is_allowed, addresses)):
            raise AddressError(host)
        return addresses

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def close(self) -> None:
        self._resolver.shutdown(wait=False, cancel_futures=True)
