"""What `featcache warm` reads: every kind of source, with real files, whole and damaged."""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from server_helpers import ImageServer, redirect, send
from warm_helpers import encoded, failures, found, images, passed_over, photos, picture

from featcache.engine.warm.items import PassedOver, SourceItem, Unreadable
from featcache.engine.warm.sources import count_files, find, shuffled
from featcache.engine.warm.web import Web
from featcache.errors import FeatcacheError
from featcache.images import DEFAULT_LIMITS, ImageLimits
from featcache.keys import source_digest

# Files and folders


def test_a_named_file_is_an_image_whatever_its_name(tmp_path: Path) -> None:
    path = tmp_path / "no suffix"
    path.write_bytes(encoded(1))
    [item] = found(path)
    assert isinstance(item, SourceItem) and item.read() == encoded(1)
    assert (item.source, item.member, item.held_bytes) == (str(path), "", 0)


def test_a_folder_gives_its_images_in_order_and_names_what_it_passes_over(tmp_path: Path) -> None:
    for name, data in {
        "b/2.PNG": encoded(2),
        "b/c/3.jpeg": encoded(3, "JPEG"),
        "a.webp": encoded(4, "WEBP"),
        "content-addressed": encoded(5),
        "notes.txt": b"hello",
        "data.bin": b"\0" * 64,
        "film.mp4": b"\0\0\0\x18ftypmp42",
        "drawing.svg": b"<svg/>",
        "log.jsonl": b'{"image": "a.webp"}\n',
        "._a.webp": b"\0\x05\x16\x07",
        ".git/x.png": encoded(6),
        "café ☕\nnew.png": encoded(7),
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    items = found(tmp_path)
    got = {os.path.relpath(name, tmp_path): data for name, data in images(items).items()}
    assert list(got) == ["a.webp", "b/2.PNG", "b/c/3.jpeg", "café ☕\nnew.png", "content-addressed"]
    assert got["b/2.PNG"] == encoded(2) and got["café ☕\nnew.png"] == encoded(7)
    over = {os.path.relpath(name, tmp_path): why for name, why in passed_over(items).items()}
    assert over == {
        "._a.webp": "is hidden",
        ".git": "is hidden",
        "data.bin": "is application/octet-stream",
        "drawing.svg": "is image/svg+xml",
        "film.mp4": "is video/mp4",
        "log.jsonl": "is a .jsonl file; name it itself to have its images read",
        "notes.txt": "is text/plain",
    }
    [newline] = [item for item in items if "\n" in item.source]
    assert "\n" not in newline.name
    assert len(items) == len(got) + len(over) + len(failures(items))


def test_links_are_followed_but_no_folder_is_entered_twice(tmp_path: Path) -> None:
    photos(tmp_path / "set" / "deep", 2)
    photos(tmp_path / "elsewhere", 1, first=9)
    (tmp_path / "set" / "deep" / "loop").symlink_to(tmp_path / "set")
    (tmp_path / "set" / "other").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "set" / "self").symlink_to(tmp_path / "set" / "self")
    (tmp_path / "set" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    os.mkfifo(tmp_path / "set" / "pipe.png")
    items = found(tmp_path / "set")
    names = [os.path.relpath(i.source, tmp_path / "set") for i in items if isinstance(i, SourceItem)]
    assert names == ["deep/00000.png", "deep/00001.png", "gone.png", "other/00009.png"]
    with pytest.raises(FeatcacheError, match="no such file"):
        next(i for i in items if i.source.endswith("gone.png")).read()  # type: ignore[union-attr]
    assert {Path(n).name: why for n, why in passed_over(items).items()} == {
        "loop": "is a link to a folder that was read already",
        "pipe.png": "is not a regular file, but a pipe, socket or device",
    }
    [(name, why)] = failures(items).items()
    assert name.endswith("self") and "back to itself" in why


def test_an_empty_folder_holds_nothing(tmp_path: Path) -> None:
    assert found(tmp_path) == []


def test_a_folder_that_may_not_be_read_is_a_failure_of_its_own(tmp_path: Path) -> None:
    photos(tmp_path, 1)
    (tmp_path / "closed").mkdir(mode=0)
    if os.access(tmp_path / "closed", os.R_OK):
        pytest.skip("this user may read every folder")
    assert "Permission denied" in str(failures(found(tmp_path)))


def test_globs(tmp_path: Path) -> None:
    photos(tmp_path / "a", 3)
    photos(tmp_path / "b" / "c", 2, first=10)
    (tmp_path / "a" / "readme.txt").write_text("no image")
    (tmp_path / "[x].png").write_bytes(encoded(77))
    assert len(images(found(f"{tmp_path}/a/*"))) == 3
    assert list(passed_over(found(f"{tmp_path}/a/*")).values()) == ["is text/plain"]
    assert len(images(found(f"{tmp_path}/**/*.png"))) == 6
    assert len(images(found(f"{tmp_path}/*"))) == 6  # folders that match are read whole
    assert len(images(found(f"{tmp_path}/**"))) == 6
    assert list(images(found(f"{tmp_path}/[x].png")).values()) == [encoded(77)]  # the file of that name
    assert "no file or folder matches" in str(failures(found(f"{tmp_path}/*.jpg")))


def test_ten_thousand_files_are_hashed_without_being_held(tmp_path: Path) -> None:
    for n in range(10_000):
        (tmp_path / f"{n:05}.png").write_bytes(b"\x89PNG\r\n\x1a\n" + n.to_bytes(4, "big") * 20)
    web = Web(DEFAULT_LIMITS)
    tracemalloc.start()
    digests = set()
    for item in find([tmp_path], web, DEFAULT_LIMITS):
        assert isinstance(item, SourceItem)
        digests.add(source_digest(item.read()))  # type: ignore[arg-type]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(digests) == 10_000
    assert peak < 12 << 20  # a tenth of it is the set of digests; the rest the sorted names
    assert count_files([tmp_path]) == 10_000


# Lists


@pytest.mark.parametrize("end", ["\n", "\r\n", "\0"])
def test_a_list_of_paths_and_urls(tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    photos(tmp_path / "here", 2)
    photos(tmp_path / "lists" / "beside", 1, first=5)
    newline = "\n" if end == "\0" else " "
    (tmp_path / "here" / f"odd{newline}name é.png").write_bytes(encoded(8))
    names = [
        "here/00000.png",
        "",
        "beside/00005.png",
        f"here/odd{newline}name é.png",
        "http://127.0.0.1:9/x.png",
    ]
    (tmp_path / "lists" / "list.txt").write_bytes(end.join([*names, "here/missing.png"]).encode())
    monkeypatch.chdir(tmp_path)
    items = found("@lists/list.txt")
    assert [i.source for i in items] == [
        f"{tmp_path}/here/00000.png",
        f"{tmp_path}/lists/beside/00005.png",  # as named from where the list is
        f"{tmp_path}/here/odd{newline}name é.png",
        "http://127.0.0.1:9/x.png",
        f"{tmp_path}/here/missing.png",
    ]
    assert items[2].read() == encoded(8)  # type: ignore[union-attr]
    with pytest.raises(FeatcacheError, match=r"missing\.png: no such file"):
        items[4].read()  # type: ignore[union-attr]


def test_a_list_that_comes_through_a_pipe(tmp_path: Path) -> None:
    photos(tmp_path / "a b", 3)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from warm_helpers import found, images\n"
        "print(len(images(found('-'))))"
    )
    list_names = subprocess.run(
        ["find", tmp_path, "-name", "*.png", "-print0"], capture_output=True, check=True
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent)],
        input=list_names.stdout,
        capture_output=True,
        check=True,
    )
    assert run.stdout == b"3\n"


def test_a_list_with_a_line_without_end(tmp_path: Path) -> None:
    photos(tmp_path, 1)
    path = tmp_path / "list"
    path.write_bytes(b"x" * 300_000 + b"\n" + f"{tmp_path}/00000.png".encode())
    items = found(f"@{path}")
    assert list(failures(items)) == ["entry 1"] and len(images(items)) == 1
    assert "no-such-list" in str(failures(found("@no-such-list")))


# Archives


def tar_of(path: Path, members: dict[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize(
    ("suffix", "mode"), [("tar", "w"), ("tar.gz", "w:gz"), ("tgz", "w:gz"), ("tar.xz", "w:xz")]
)
def test_webdataset_shards(tmp_path: Path, suffix: str, mode: str) -> None:
    members: dict[str, bytes] = {}
    for n in range(5):
        members |= {
            f"{n:06}.png": encoded(n),
            f"{n:06}.json": b"{}",
            f"{n:06}.left.jpg": encoded(50 + n, "JPEG"),
        }
    members |= {"blob": encoded(99), "cls": b"7", "inner.zip": b"PK", "__MACOSX/._1.png": b"\0"}
    long_name = "x" * 180 + "/é\n.png"
    members[long_name] = encoded(98)
    items = found(tar_of(tmp_path / f"shard.{suffix}", members, mode))
    got = images(items)
    assert got == {
        name: data for name, data in members.items() if name.endswith((".png", ".jpg")) and "._" not in name
    } | {"blob": encoded(99)}
    assert passed_over(items) == {
        **{f"{n:06}.json": "is application/json" for n in range(5)},
        "cls": "is no image",
        "inner.zip": "is an archive within an archive",
        "__MACOSX/._1.png": "is hidden",
    }
    assert len(items) == len(members)
    assert all(item.held_bytes == len(got[item.member]) for item in items if isinstance(item, SourceItem))


@pytest.mark.parametrize("where", ["data", "header", "boundary"])
def test_a_tar_that_is_damaged_gives_what_comes_before(tmp_path: Path, where: str) -> None:
    members = {f"{n}.png": encoded(n, size=(300, 200)) + bytes(2000) for n in range(6)}
    whole = tar_of(tmp_path / "whole.tar", members).read_bytes()
    third = whole.index(members["3.png"][:500])
    if where == "data":
        damaged = whole[: third + 700]  # cut off within an image
    elif where == "header":
        damaged = whole[: third - 512] + os.urandom(512) + whole[third:]
    else:
        damaged = whole[: third - 300]  # cut off within a header
    (tmp_path / "shard.tar").write_bytes(damaged)
    items = found(tmp_path / "shard.tar")
    assert list(images(items)) == ["0.png", "1.png", "2.png"]
    [(name, why)] = failures(items).items()
    assert name.endswith("shard.tar") and "can't be read on after" in why


@pytest.mark.parametrize(
    "data", [b"", b"no tar at all" * 100, bytes(range(256)) * 80, gzip.compress(b"x" * 5000, mtime=0)[:30]]
)
@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "zip", "parquet", "arrow"])
def test_what_is_no_archive_is_one_failure(tmp_path: Path, suffix: str, data: bytes) -> None:
    path = tmp_path / f"x.{suffix}"
    path.write_bytes(data)
    items = found(path, tmp_path / "missing.tar", tmp_path / f"missing.{suffix}")
    assert [type(item) for item in items] == [Unreadable] * 3
    assert all("x." in str(i.error) or "missing" in str(i.error) for i in items if isinstance(i, Unreadable))


def test_a_shard_is_read_in_the_memory_of_one_image(tmp_path: Path) -> None:
    path = tar_of(tmp_path / "big.tar", {f"{n}.png": bytes([n]) * (1 << 20) for n in range(40)})
    web = Web(DEFAULT_LIMITS)
    tracemalloc.start()
    number = sum(isinstance(item, SourceItem) for item in find([path], web, DEFAULT_LIMITS))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert number == 40 and peak < 5 << 20


def test_zip_with_bad_members(tmp_path: Path) -> None:
    path = tmp_path / "set.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for n in range(3):
            archive.writestr(f"dir/é{n}.png", encoded(n))
        archive.writestr("dir/readme.md", "text")
        archive.writestr("bomb.png", bytes(3 << 20), zipfile.ZIP_DEFLATED)
    data = bytearray(path.read_bytes())
    at = data.index(encoded(1))
    data[at + 50] ^= 0xFF
    path.write_bytes(data)
    web = Web(DEFAULT_LIMITS)
    items = list(find([path], web, ImageLimits(max_encoded_bytes=1 << 20)))
    assert images(items) == {"dir/é0.png": encoded(0), "dir/é2.png": encoded(2)}
    assert list(passed_over(items)) == ["dir/readme.md"]
    assert "Bad CRC" in failures(items)["dir/é1.png"] and "the limit" in failures(items)["bomb.png"]


def test_an_encrypted_zip_member_is_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "set.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.png", encoded(1))
    data = bytearray(path.read_bytes())
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(signature) + offset] |= 1
    path.write_bytes(data)
    assert "encrypted" in failures(found(path))["a.png"]


# Tables

BOTH = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def write_table(table: pa.Table, path: Path) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=4)
    elif path.suffix == ".feather":
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=4)
    else:  # as the datasets library saves
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=4)
    return path


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "feather"])
def test_tables_as_hugging_face_lays_them_out(tmp_path: Path, suffix: str) -> None:
    photos(tmp_path / "files", 1, first=70)
    cells: list[Any] = [{"bytes": encoded(n), "path": f"{n}.png"} for n in range(9)]
    cells += [{"bytes": None, "path": "files/00070.png"}, None, {"bytes": None, "path": None}]
    table = pa.table({"label": list(range(12)), "photo_of_day": pa.array(cells, BOTH)})
    items = found(write_table(table, tmp_path / f"t.{suffix}"))
    got = images(items)
    assert got == {f"row {n}": encoded(n) for n in range(9)} | {"row 9": encoded(70)}
    assert passed_over(items) == {"row 10": "is empty", "row 11": "is empty"}


@pytest.mark.parametrize(
    ("name", "kind", "cell"),
    [
        ("image", pa.binary(), encoded),
        ("jpg", pa.large_binary(), encoded),
        ("image_path", pa.string(), lambda n: f"files/{n:05}.png"),
        ("image", pa.string(), lambda n: "data:image/png;base64," + base64.b64encode(encoded(n)).decode()),
        ("image_base64", pa.large_string(), lambda n: base64.b64encode(encoded(n)).decode()),
    ],
)
def test_image_columns_of_other_types(tmp_path: Path, name: str, kind: Any, cell: Any) -> None:
    photos(tmp_path / "files", 6)
    table = pa.table({"id": list(range(6)), name: pa.array([cell(n) for n in range(6)], kind)})
    assert images(found(write_table(table, tmp_path / "t.parquet"))) == {
        f"row {n}": encoded(n) for n in range(6)
    }


def test_lists_of_images_and_several_columns(tmp_path: Path) -> None:
    table = pa.table(
        {
            "image_1": pa.array([encoded(1), encoded(2)]),
            "image_2": pa.array([encoded(3), None]),
            "pages": pa.array([[encoded(4), encoded(5)], []], pa.list_(pa.binary())),
            "image": pa.array(["not declared", "as an image"]),
        },
        metadata={
            "huggingface": json.dumps(
                {
                    "info": {
                        "features": {
                            "image_1": {"_type": "Image"},
                            "image_2": {"_type": "Image"},
                            "pages": {"feature": {"_type": "Image"}, "_type": "Sequence"},
                            "image": {"dtype": "string", "_type": "Value"},
                        }
                    }
                }
            )
        },
    )
    items = found(write_table(table, tmp_path / "t.parquet"))
    assert images(items) == {
        "row 0, image_1": encoded(1),
        "row 0, image_2": encoded(3),
        "row 0, pages[0]": encoded(4),
        "row 0, pages[1]": encoded(5),
        "row 1, image_1": encoded(2),
    }
    assert passed_over(items) == {"row 1, image_2": "is empty", "row 1, pages": "is an empty list"}


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_table_without_an_image_column_says_what_it_has(tmp_path: Path, suffix: str) -> None:
    items = found(write_table(pa.table({"text": ["a"], "label": [1]}), tmp_path / f"t.{suffix}"))
    [why] = failures(items).values()
    assert "no column of images" in why and "text, label" in why and len(items) == 1


def test_a_damaged_row_group_harms_no_other(tmp_path: Path) -> None:
    table = pa.table({"image": pa.array([os.urandom(2000) for _ in range(12)], pa.binary())})
    path = write_table(table, tmp_path / "t.parquet")
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    data[column.data_page_offset : column.data_page_offset + 40] = b"\xff" * 40
    path.write_bytes(data)
    items = found(path)
    assert list(images(items)) == [f"row {n}" for n in (0, 1, 2, 3, 8, 9, 10, 11)]
    assert list(failures(items)) == ["row group 1, from row 4"]


def test_a_big_row_group_is_read_in_little_memory(tmp_path: Path) -> None:
    table = pa.table({"image": pa.array([os.urandom(1 << 20) for _ in range(96)], pa.binary())})
    # Arrow writes a page of 1,024 values at least, and a page is what a reader has to hold
    sizes = {"row_group_size": 96, "data_page_size": 1 << 20, "write_batch_size": 1}
    pq.write_table(table, tmp_path / "t.parquet", compression="none", use_dictionary=False, **sizes)
    del table
    before = pa.total_allocated_bytes()
    peak = 0
    for _ in find([tmp_path / "t.parquet"], Web(DEFAULT_LIMITS), DEFAULT_LIMITS):
        peak = max(peak, pa.total_allocated_bytes() - before)
    assert peak < 40 << 20


# Rows


def data_uri(seed: int) -> str:
    return "data:image/png;base64," + base64.b64encode(encoded(seed)).decode()


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_openai_requests_and_batch_files(tmp_path: Path) -> None:
    photos(tmp_path, 1, first=3)
    one = {
        "role": "user",
        "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": data_uri(1)}}],
    }
    two = {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": data_uri(2), "max_pixels": 9000},
            {"type": "image", "image": "00003.png"},
            {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/never-asked.png"}},
        ],
    }
    rows = [
        {"model": "m", "messages": [one]},
        {"custom_id": "x", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [one, two]}},
        {
            "body": {
                "input": [{"role": "user", "content": [{"type": "input_image", "image_url": data_uri(4)}]}]
            }
        },
        [two],
        {"messages": [{"role": "user", "content": "only text"}]},
    ]
    items = found(write_rows(tmp_path / "requests.jsonl", rows))
    got = {i.member: i for i in items if isinstance(i, SourceItem)}
    assert list(got) == [
        "line 1: messages[0].content[1]",
        "line 2: messages[0].content[1]",
        "line 2: messages[1].content[0]",
        "line 2: messages[1].content[1]",
        "line 2: messages[1].content[2]",
        "line 3: messages[0].content[0]",
        "line 4: messages[0].content[0]",
        "line 4: messages[0].content[1]",
        "line 4: messages[0].content[2]",
    ]
    assert got["line 1: messages[0].content[1]"].read() == encoded(1)
    assert got["line 2: messages[1].content[1]"].read() == encoded(3)
    assert got["line 3: messages[0].content[0]"].read() == encoded(4)
    assert [i.num_images for i in got.values()] == [1, 4, 4, 4, 4, 1, 3, 3, 3]
    assert [dict(i.options) for i in got.values()][2] == {"max_pixels": 9000}
    assert dict(got["line 1: messages[0].content[1]"].options) == {}
    assert passed_over(items) == {"line 5": "holds no image"}


def test_rows_with_image_fields(tmp_path: Path) -> None:
    photos(tmp_path / "img", 9)
    mark = {
        "role": "user",
        "content": [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}],
    }
    rows: list[Any] = [
        {"image": "img/00000.png"},
        {"images": ["img/00001.png", {"path": "img/00002.png", "bytes": None}, {"url": data_uri(3)}]},
        {"image_url": {"url": data_uri(4)}},
        {"image": base64.b64encode(encoded(5)).decode()},
        {"image": {"bytes": base64.b64encode(encoded(6)).decode(), "path": "x.png"}},
        {"messages": [mark], "images": ["img/00007.png", "img/00008.png"]},
        {"file_name": "img/00000.png", "text": "caption"},
        {"image": None, "text": "none"},
        "",
        {"image": 7},
        {"image": {"foo": 1}},
        "{broken",
        "[1, 2]",
        '"text"',
        "[" * 100_000,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "data:nonsense"}]}]},
    ]
    items = found(write_rows(tmp_path / "rows.jsonl", rows))
    assert images(items) == {
        "line 1: image": encoded(0),
        "line 2: images[0]": encoded(1),
        "line 2: images[1]": encoded(2),
        "line 2: images[2]": encoded(3),
        "line 3: image_url": encoded(4),
        "line 4: image": encoded(5),
        "line 5: image": encoded(6),
        "line 6: images[0]": encoded(7),
        "line 6: images[1]": encoded(8),
        "line 7: file_name": encoded(0),
    }
    assert [i.num_images for i in items if isinstance(i, SourceItem)] == [1, 1, 1, 1, 1, 1, 1, 2, 2, 1]
    assert passed_over(items) == {"line 8": "holds no image"} | {"line 13": "holds no image"}
    why = failures(items)
    assert list(why) == ["line 10: image", "line 11: image", "line 12", "line 14", "line 15", "line 16"]
    assert "a int" in why["line 10: image"] and "not JSON" in why["line 12"] and "comma" in why["line 16"]


def test_gzipped_rows_and_a_cut_off_end(tmp_path: Path) -> None:
    text = "".join(json.dumps({"image": data_uri(n)}) + "\n" for n in range(30)).encode()
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(text))
    assert len(images(found(path))) == 30
    path.write_bytes(gzip.compress(text)[:-200])
    items = found(path)
    assert 1 <= len(images(items)) < 30
    assert "Compressed file ended" in str(failures(items))


# Addresses


def test_images_by_url(tmp_path: Path) -> None:
    with ImageServer() as server:
        good = server.image("/a.png", encoded(1))
        server.routes["/moved"] = redirect("/a.png")
        server.routes["/round"] = redirect("/round")
        shard = tar_of(tmp_path / "s.tar", {f"{n}.png": encoded(n) for n in range(20)}).read_bytes()
        server.image("/shards/s.tar", shard)
        server.image("/cut.tar", shard[: len(shard) // 2])
        server.image("/rows.jsonl", json.dumps({"image": data_uri(5)}).encode())
        server.image("/set.parquet", b"PAR1")
        server.image("/large.png", bytes(5000))
        refusals = iter([503, 429])

        def busy(request: Any) -> None:
            status = next(refusals, 200)
            send(request, encoded(2) if status == 200 else b"", status=status)

        server.routes["/busy.png"] = busy
        web = Web(ImageLimits(max_encoded_bytes=4000), timeout_s=5)
        urls = [good, *map(server.url, ["/moved", "/busy.png", "/nothing.png", "/round", "/large.png"])]
        items = list(find([*urls, "http://127.0.0.1:1/refused.png"], web, DEFAULT_LIMITS))
        assert [i.read() for i in items[:3]] == [encoded(1), encoded(1), encoded(2)]  # type: ignore[union-attr]
        assert server.hits["/busy.png"] == 3
        for item, why in zip(
            items[3:], ["HTTP 404", "redirect", "the limit is", "can't be fetched"], strict=True
        ):
            with pytest.raises(FeatcacheError, match=why):
                item.read()  # type: ignore[union-attr]
        web.close()
        streams = found(server.url("/shards/s.tar"), server.url("/rows.jsonl"))
        assert images(streams) == {f"{n}.png": encoded(n) for n in range(20)} | {"line 1: image": encoded(5)}
        cut = found(server.url("/cut.tar"))
        assert 0 < len(images(cut)) < 20 and len(failures(cut)) == 1
        assert "download it first" in str(failures(found(server.url("/set.parquet"))))
        assert "HTTP 404" in str(failures(found(server.url("/none.tar"))))


# In Python, and in another order


def test_bytes_and_pil_images() -> None:
    image = picture(3)
    first, second = found(encoded(1), image)
    assert isinstance(first, SourceItem) and first.read() == encoded(1)
    assert isinstance(second, SourceItem) and second.read() is image
    assert second.name == "PIL image 60x44" and second.held_bytes == 60 * 44 * 3


def test_shuffled_is_a_permutation_that_depends_on_the_seed() -> None:
    items = [PassedOver(str(n), "", "") for n in range(1000)]
    once, again, other = list(shuffled(items, 1)), list(shuffled(items, 1)), list(shuffled(items, 2))
    assert once == again != other != items
    assert sorted(once, key=lambda i: int(i.source)) == items


def test_shuffling_holds_a_bounded_window() -> None:
    taken = 0

    def stream() -> Any:
        nonlocal taken
        for _ in range(40):
            taken += 1
            yield SourceItem("s", "m", lambda: b"", held_bytes=32 << 20)

    out = shuffled(stream(), 0)
    next(out)
    assert taken == 9  # 256 MiB, and the one that went over
    assert 1 + sum(1 for _ in out) == 40


def test_counting_ahead(tmp_path: Path) -> None:
    photos(tmp_path / "a", 3)
    (tmp_path / "a" / "x.txt").write_text("no")
    assert count_files([tmp_path / "a", tmp_path / "a" / "00000.png", b"bytes"]) == 5
    assert count_files([tmp_path / "a", "http://x/y.png"]) is None
    assert count_files(["-"]) is None and count_files(["@list"]) is None
    tar_of(tmp_path / "a" / "s.tar", {})
    assert count_files([tmp_path / "a"]) is None
