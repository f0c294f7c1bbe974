"""Images by URL: what is fetched, what is refused, and what isn't fetched twice."""

from __future__ import annotations

import asyncio
import gzip
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, TypeVar

import pytest
from server_helpers import ImageServer, png, redirect, send

from featcache.keys import SourceDigest, source_digest
from featcache.server.media.addresses import CheckedNetwork, is_public
from featcache.server.media.fetcher import Fetched, MediaError, MediaFetcher, MediaRules
from featcache.server.media.urls import UrlMemory

T = TypeVar("T")


class Table:
    """An alias table in memory: what FeatureStore.alias and put_alias promise, and nothing else."""

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes] = {}

    def alias(self, key: bytes) -> bytes | None:
        return self.rows.get(key)

    def put_alias(self, key: bytes, value: bytes) -> None:
        self.rows[key] = value


def anywhere(address: str) -> bool:
    return True


def run(
    work: Callable[[MediaFetcher], Awaitable[T]],
    rules: MediaRules | None = None,
    is_allowed: Callable[[str], bool] = anywhere,
    table: Table | None = None,
) -> T:
    async def main() -> T:
        with ThreadPoolExecutor(4) as executor:
            network = CheckedNetwork(is_allowed)
            fetcher = MediaFetcher(rules or MediaRules(), UrlMemory(table or Table()), executor, network)
            try:
                return await work(fetcher)
            finally:
                await fetcher.close()

    return asyncio.run(main())


def fetch(url: str, rules: MediaRules | None = None, **where: Any) -> Fetched:
    return run(lambda fetcher: fetcher.fetch(url, name="image 1"), rules, **where)


def refusal(url: str, rules: MediaRules | None = None, **where: Any) -> str:
    with pytest.raises(MediaError) as caught:
        fetch(url, rules, **where)
    assert str(caught.value).startswith("image 1: ")
    return str(caught.value)


@pytest.fixture
def web() -> Iterator[ImageServer]:
    with ImageServer() as server:
        yield server


def test_an_image_comes_with_its_digest(web: ImageServer) -> None:
    data = png()
    assert fetch(web.image("/a.png", data)) == Fetched(source_digest(data), data)


def test_redirects_are_followed_relative_and_absolute(web: ImageServer) -> None:
    data = png()
    web.image("/c/d.png", data)
    web.routes["/a"] = redirect(web.url("/c/b"))
    web.routes["/c/b"] = redirect("d.png")
    assert fetch(web.url("/a")).data == data


# Where it may lie


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "100.64.0.1"),
        *(
            "192.0.0.8",
            "198.18.0.1",
            "203.0.113.5",
            "224.0.0.1",
            "240.0.0.1",
            "255.255.255.255",
            "192.88.99.1",
        ),
        *(
            "::1",
            "::",
            "fe80::1",
            "fe80::1%eth0",
            "fc00::1",
            "fd12::1",
            "ff02::1",
            "fec0::1",
            "2001:db8::1",
            "3fff::1",
        ),
        *("::ffff:127.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1", "::ffff:0:10.0.0.1"),
        *("64:ff9b::7f00:1", "64:ff9b:1::808:808", "2002:7f00:1::", "2002:a9fe:a9fe::1", "2001::1"),
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1"],
)
def test_addresses_that_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "localhost", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "[::1]", "0"),
        *("[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "169.254.169.254", "127.0.0.1.", "LOCALHOST", "①27.0.0.1"),
    ],
)
def test_no_spelling_of_a_private_address_is_connected_to(web: ImageServer, host: str) -> None:
    web.image("/a.png", png())
    message = refusal(web.url("/a.png", host), is_allowed=is_public)
    assert "has no public address" in message or "is not a valid URL" in message
    assert not web.hits


def test_a_name_that_leads_to_a_private_address_is_refused(
    web: ImageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    web.image("/a.png", png())
    names = {"inside.example": ["127.0.0.1"], "mixed.example": ["8.8.8.8", "127.0.0.1"]}

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in names[host]]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    for name in names:
        assert (
            refusal(web.url("/a.png", name), is_allowed=is_public) == f"image 1: {name} has no public address"
        )
    assert not web.hits


def test_a_name_that_answers_differently_the_second_time_is_asked_once(
    web: ImageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = png()
    web.image("/a.png", data)
    with ImageServer("127.0.0.2") as other:  # stands for the inside; same port is not needed: never connected
        answers = iter([["127.0.0.1"], [other.address]])

        def resolve(host: str, port: int, **_: Any) -> list[Any]:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in next(answers)]

        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        url = web.url("/a.png", "rebinding.example")
        assert fetch(url, is_allowed=lambda address: address == "127.0.0.1").data == data
        assert web.requests[0][1]["host"] == f"rebinding.example:{web.port}"
        assert not other.hits


def test_a_redirect_to_a_private_address_is_refused(web: ImageServer) -> None:
    web.image("/secret.png", png())
    with ImageServer("127.0.0.2") as outside:  # stands for a public host
        for location in (web.url("/secret.png"), web.url("/secret.png", "2130706433")):
            outside.routes["/a.png"] = redirect(location)
            message = refusal(outside.url("/a.png"), is_allowed=lambda address: address == "127.0.0.2")
            assert message.endswith("has no public address")
        assert outside.hits["/a.png"] == 2
    assert not web.hits


@pytest.mark.parametrize(
    "location", ["file:///etc/passwd", "gopher://127.0.0.1/", "data:image/png;base64,AAAA"]
)
def test_a_redirect_leads_to_http_only(web: ImageServer, location: str) -> None:
    web.routes["/a"] = redirect(location)
    assert "URLs aren't fetched" in refusal(web.url("/a"))


@pytest.mark.parametrize("location", ["", "http://[::1", "http://exa mple/"])
def test_a_redirect_to_nowhere_is_refused(web: ImageServer, location: str) -> None:
    web.routes["/a"] = redirect(location)
    refusal(web.url("/a"))


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://example.org/a.png", "ftp: URLs aren't fetched"),
        ("FTP://example.org/a.png", "ftp: URLs aren't fetched"),
        ("javascript:alert(1)", "javascript: URLs aren't fetched"),
        ("a.png", "is not a URL"),
        ("/etc/passwd", "is not a URL"),
        ("", "is not a URL"),
        ("http://", "without a host"),
        ("http:///a.png", "without a host"),
        ("http://user:secret@example.org/a.png", "user name or password"),
        ("http://example.org@127.0.0.1/a.png", "user name or password"),
        ("http://127.0.0.1\\@example.org/a.png", ""),
        ("http://[::1/a.png", "not a valid URL"),
        ("http://example.org:99999/", "not a valid URL"),
        ("http://exam\nple.org/", "not a valid URL"),
        ("http://example.org/" + "a" * 9000, "characters; the limit is 8192"),
        ("file:///etc/passwd", "not allowed on this server"),
        ("FILE:///etc/passwd", "not allowed on this server"),
    ],
)
def test_what_is_no_web_address_is_refused(url: str, why: str) -> None:
    assert why in refusal(url, is_allowed=is_public)


def test_only_allowed_domains_at_every_hop(web: ImageServer) -> None:
    data = png()
    web.image("/a.png", data)
    only = MediaRules(allowed_domains=("localhost",))
    assert fetch(web.url("/a.png", "LOCALHOST"), only).data == data
    assert "not among the hosts" in refusal(web.url("/a.png"), only)
    web.routes["/out"] = redirect(web.url("/a.png"))
    assert "not among the hosts" in refusal(web.url("/out", "localhost"), only)
    below = MediaRules(allowed_domains=("*.example.org",))
    assert "not among the hosts" in refusal("http://evilexample.org/a.png", below)
    assert "not among the hosts" in refusal("http://example.org.evil.com/a.png", below)
    assert "no public address" in refusal("http://a.example.org/", below, is_allowed=lambda _: False)


def test_local_files_only_below_the_allowed_folder(tmp_path: Path) -> None:
    data, root = png(), tmp_path / "open"
    (root / "deep").mkdir(parents=True)
    (root / "deep" / "a b.png").write_bytes(data)
    (tmp_path / "secret.png").write_bytes(data)
    (root / "out.png").symlink_to(tmp_path / "secret.png")
    (root / "up").symlink_to(tmp_path)
    (root / "inside.png").symlink_to(root / "deep" / "a b.png")
    rules = MediaRules(local_path=root)
    assert fetch(f"file://{root}/deep/a%20b.png", rules).data == data
    assert fetch(f"file://localhost{root}/inside.png", rules).data == data
    for path in ("out.png", "up/secret.png", "../secret.png", "%2e%2e/secret.png", "deep", "missing.png"):
        message = refusal(f"file://{root}/{path}", rules)
        assert message == "image 1: is not a file that this server may read"
    for url in (f"file://host{root}/inside.png", "file:inside.png", f"file://{root}/a%00.png"):
        assert "is not a file: URL of an absolute path" in refusal(url, rules)
    assert "the limit for a file" in refusal(
        f"file://{root}/inside.png", MediaRules(local_path=root, max_bytes=10)
    )


# How much and how long


def test_a_body_larger_than_the_limit_is_refused_by_its_length_and_by_its_bytes(web: ImageServer) -> None:
    def endless(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Type", "image/png")
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        for _ in range(10_000):
            request.wfile.write(b"10000\r\n" + bytes(65536) + b"\r\n")
        web.hits["finished"] += 1

    rules = MediaRules(max_bytes=1 << 20)
    web.image("/long.png", bytes((1 << 20) + 1))
    web.routes["/endless.png"] = endless
    assert "more than 1 MiB" in refusal(web.url("/long.png"), rules)
    assert "more than 1 MiB" in refusal(web.url("/endless.png"), rules)
    assert not web.hits["finished"]
    assert fetch(web.image("/fits.png", bytes(1 << 20)), rules).data == bytes(1 << 20)


def test_compressed_bodies_are_inflated_and_bombs_are_not(web: ImageServer) -> None:
    data = png()
    encoded = {"Content-Encoding": "gzip"}
    web.routes["/a.png"] = lambda request: send(request, gzip.compress(data), headers=encoded)
    web.routes["/bomb.png"] = lambda request: send(request, gzip.compress(bytes(64 << 20)), headers=encoded)
    web.routes["/broken.png"] = lambda request: send(request, b"not gzip", headers=encoded)
    web.routes["/br.png"] = lambda request: send(request, data, headers={"Content-Encoding": "br"})
    rules = MediaRules(max_bytes=4 << 20)
    assert fetch(web.url("/a.png"), rules).data == data
    assert "more than 4 MiB" in refusal(web.url("/bomb.png"), rules)
    assert "damaged" in refusal(web.url("/broken.png"), rules)
    assert "content-encoding br" in refusal(web.url("/br.png"), rules)


def test_all_downloads_together_have_a_limit(web: ImageServer) -> None:
    web.image("/a.png", bytes(3 << 20))

    async def work(fetcher: MediaFetcher) -> None:
        with pytest.raises(MediaError, match="too many images"):
            await fetcher.fetch(web.url("/a.png"), name="image 1")
        assert fetcher._total_bytes == 0  # what failed gives its share back

    run(work, MediaRules(max_total_bytes=1 << 20))


@pytest.mark.parametrize(
    ("kind", "fine"),
    [
        ("image/jpeg", True),
        ("image/webp; charset=binary", True),
        ("application/octet-stream", True),
        ("binary/octet-stream", True),
        (None, True),
        ("text/html", False),
        ("application/json", False),
    ],
)
def test_content_types(web: ImageServer, kind: str | None, fine: bool) -> None:
    data = png()
    web.routes["/a"] = lambda request: send(request, data, content_type=kind)
    if fine:
        assert fetch(web.url("/a")).data == data
    else:
        assert refusal(web.url("/a")) == f"image 1: is {kind}, not an image"


@pytest.mark.parametrize("status", [404, 403, 500, 204, 206, 304])
def test_other_statuses_are_errors(web: ImageServer, status: int) -> None:
    web.routes["/a"] = lambda request: send(request, b"", status=status)
    assert f"its server answered {status}" in refusal(web.url("/a"))


def test_redirects_end(web: ImageServer) -> None:
    web.routes["/loop"] = redirect("/loop")
    assert "more than 5 redirects" in refusal(web.url("/loop"))
    assert web.hits["/loop"] == 6


def test_servers_that_never_finish_are_given_up(web: ImageServer) -> None:
    def silent(request: BaseHTTPRequestHandler) -> None:
        web.released.wait(20)

    def drip(request: BaseHTTPRequestHandler) -> None:  # a byte now and then: no single read times out
        request.send_response(200)
        request.send_header("Content-Length", "100000")
        request.end_headers()
        while not web.released.wait(0.02):
            request.wfile.write(b"x")

    web.routes["/silent.png"] = silent
    web.routes["/drip.png"] = drip
    rules = MediaRules(timeout_s=0.4)
    for path in ("/silent.png", "/drip.png"):
        message = refusal(web.url(path), rules)
        assert "not fetched within 0.4 s" in message or "did not answer in time" in message


def test_hosts_that_cannot_be_reached_have_a_reason() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert "can't be reached" in refusal(f"http://127.0.0.1:{unused.getsockname()[1]}/a.png")
    assert "has no public address" in refusal("http://no-such-host.invalid/a.png")


def test_a_server_that_is_no_http_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"SSH-2.0-OpenSSH\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert "can't be reached, or broke off" in refusal(f"http://127.0.0.1:{listener.getsockname()[1]}/")
        thread.join()


def test_one_slow_host_holds_up_nobody_else(web: ImageServer) -> None:
    def stalled(request: BaseHTTPRequestHandler) -> None:
        web.released.wait(20)
        send(request, png())

    web.routes["/slow.png"] = stalled
    data = png((1, 2, 3))

    async def work(fetcher: MediaFetcher) -> None:
        slow = [
            asyncio.create_task(fetcher.fetch(f"{web.url('/slow.png')}?{n}", name="slow")) for n in range(100)
        ]
        with ImageServer("127.0.0.2") as quick:
            url = quick.image("/a.png", data)
            while web.hits["/slow.png"] < 16:
                await asyncio.sleep(0.01)
            assert (await fetcher.fetch(url, name="quick")).data == data
        assert not any(task.done() for task in slow)
        assert web.hits["/slow.png"] == 16  # the others wait their turn
        web.released.set()
        assert len(await asyncio.gather(*slow)) == 100

    run(work)


# What isn't fetched twice


def test_downloads_of_one_url_are_joined_and_outlive_their_first_waiter(web: ImageServer) -> None:
    data = png()

    def stalled(request: BaseHTTPRequestHandler) -> None:
        web.released.wait(20)
        send(request, data)

    web.routes["/a.png"] = stalled

    async def work(fetcher: MediaFetcher) -> None:
        tasks = [asyncio.create_task(fetcher.fetch(web.url("/a.png"), name=f"image {n}")) for n in range(50)]
        other = asyncio.create_task(fetcher.fetch(web.url("/a.png"), name="image", namespace="other"))
        while web.hits["/a.png"] < 2:
            await asyncio.sleep(0.01)
        tasks[0].cancel()
        web.released.set()
        results = await asyncio.gather(*tasks[1:], other)
        assert all(result.data == data for result in results)
        assert tasks[0].cancelled()
        assert web.hits["/a.png"] == 2  # one for each namespace
        assert fetcher.counts["joined"] == 49
        assert not fetcher._flights and not fetcher._hosts

    run(work)


def test_when_all_who_wait_are_gone_the_download_ends(web: ImageServer) -> None:
    web.routes["/a.png"] = lambda request: web.released.wait(20)  # type: ignore[assignment, return-value]

    async def work(fetcher: MediaFetcher) -> None:
        tasks = [asyncio.create_task(fetcher.fetch(web.url("/a.png"), name="image")) for _ in range(3)]
        while not web.hits["/a.png"]:
            await asyncio.sleep(0.01)
        (flight,) = fetcher._flights.values()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.wait([flight.task])
        assert flight.task.cancelled()
        assert not fetcher._flights and not fetcher._hosts

    run(work)


def test_a_failure_reaches_all_who_wait_and_is_not_kept(web: ImageServer) -> None:
    data = png()

    async def work(fetcher: MediaFetcher) -> None:
        url = web.url("/a.png")
        tasks = [fetcher.fetch(url, name=f"image {n}") for n in range(5)]
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(error) for error in errors] == [f"image {n}: its server answered 404" for n in range(5)]
        web.image("/a.png", data)
        assert (await fetcher.fetch(url, name="image")).data == data

    run(work)


def with_validators(web: ImageServer, data: bytes, **validators: str) -> str:
    """A server that answers 304 to its own validators, as servers do."""

    def route(request: BaseHTTPRequestHandler) -> None:
        asked = {
            "ETag": request.headers.get("If-None-Match"),
            "Last-Modified": request.headers.get("If-Modified-Since"),
        }
        headers = {name.replace("_", "-"): value for name, value in validators.items()}
        if any(value is not None and value == headers.get(name) for name, value in asked.items()):
            web.hits["304"] += 1
            send(request, b"", status=304, headers=headers)
        else:
            send(request, data, headers=headers)

    web.routes["/a.png"] = route
    return web.url("/a.png")


def fetch_again(
    url: str, table: Table, *, known: bool = True, rules: MediaRules | None = None, namespace: str = ""
) -> Fetched:
    def is_known(digest: SourceDigest) -> bool:
        return known

    def work(fetcher: MediaFetcher) -> Awaitable[Fetched]:
        return fetcher.fetch(url, name="image 1", namespace=namespace, is_known=is_known)

    return run(work, rules, table=table)


OLD = formatdate(1_700_000_000, usegmt=True)


@pytest.mark.parametrize("validators", [{"ETag": '"abc"'}, {"Last_Modified": OLD}])
def test_a_known_url_is_revalidated_not_fetched(web: ImageServer, validators: dict[str, str]) -> None:
    data, table = png(), Table()
    url = with_validators(web, data, **validators)
    assert fetch_again(url, table) == Fetched(source_digest(data), data)
    assert fetch_again(url, table) == Fetched(source_digest(data), None)
    assert web.hits["304"] == 1
    assert fetch_again(url, table, known=False).data == data  # its features are gone: the bytes are needed
    assert fetch_again(url, table, namespace="other").data == data  # another tenant's memory is its own
    assert web.hits["304"] == 1


def test_changed_bytes_are_seen(web: ImageServer) -> None:
    table, new = Table(), png((9, 9, 9))
    fetch_again(with_validators(web, png(), ETag='"1"'), table)
    assert fetch_again(with_validators(web, new, ETag='"2"'), table) == Fetched(source_digest(new), new)


@pytest.mark.parametrize(
    "validators",
    [
        {"ETag": 'W/"abc"'},  # weak: not the same bytes
        {"ETag": '"' + "x" * 300 + '"'},
        {"ETag": '"abc"', "Cache_Control": "private, no-store"},
        {"Last_Modified": "not a date"},
    ],
)
def test_weak_and_forbidden_validators_are_not_used(web: ImageServer, validators: dict[str, str]) -> None:
    data, table = png(), Table()
    url = with_validators(web, data, **validators)
    assert fetch_again(url, table).data == fetch_again(url, table).data == data
    assert not web.hits["304"]


def test_a_file_changed_just_now_is_fetched_again(web: ImageServer) -> None:
    table = Table()
    url = with_validators(
        web, png(), Last_Modified=formatdate(usegmt=True)
    )  # it may change within the second
    assert fetch_again(url, table).data is not None
    assert fetch_again(url, table).data is not None


def test_a_validator_is_sent_only_to_the_address_that_gave_it(web: ImageServer) -> None:
    table, first, second = Table(), png((1, 1, 1)), png((2, 2, 2))
    web.routes["/latest"] = redirect("/a.png")
    with_validators(web, first, ETag='"1"')
    assert fetch_again(web.url("/latest"), table).data == first
    assert fetch_again(web.url("/latest"), table) == Fetched(source_digest(first), None)
    with_validators(web, second, ETag='"1"')  # another file, whose server counts from 1 too
    web.routes["/b.png"] = web.routes.pop("/a.png")
    web.routes["/latest"] = redirect("/b.png")
    assert fetch_again(web.url("/latest"), table).data == second


def test_within_its_ttl_a_known_url_is_not_even_asked(web: ImageServer) -> None:
    data, table, rules = png(), Table(), MediaRules(ttl_s=3600)
    url = web.image("/a.png", data)
    assert fetch_again(url, table, rules=rules).data == data
    assert fetch_again(url, table, rules=rules) == Fetched(source_digest(data), None)
    assert web.hits["/a.png"] == 1
    assert fetch_again(url, table, rules=rules, known=False).data == data
    assert fetch_again(url, table, rules=MediaRules()).data == data


def test_requests_carry_nothing_of_other_requests(web: ImageServer) -> None:
    web.image("/a.png", png(), Set_Cookie="session=1")

    async def work(fetcher: MediaFetcher) -> None:
        for _ in range(2):
            await fetcher.fetch(web.url("/a.png#fragment"), name="image")

    run(work)
    for path, headers in web.requests:
        assert path == "/a.png"
        assert "cookie" not in headers and "authorization" not in headers
        assert headers["accept-encoding"] == "identity"
