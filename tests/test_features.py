"""Records: what goes in comes out, any safetensors reader opens them, and no damage passes."""

from __future__ import annotations

import gc
import json
import struct
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from featcache.errors import RecordError
from featcache.features import (
    DTYPES,
    MAX_HEADER_BYTES,
    Features,
    Header,
    Layout,
    TensorSpec,
    bytes_of,
    checksum,
    pack,
    tensors_of,
    unpack,
)

KEY, ENCODER = bytes(range(32)), bytes(range(100, 132))

dtypes = st.sampled_from([getattr(torch, name) for name, _ in DTYPES.values()])
names = st.one_of(st.sampled_from(["rows", "deepstack.0", "deepstack.1"]), st.text(max_size=6))
pairs = st.tuples(st.integers(0, 50), st.integers(0, 50))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    return Layout(
        num_tokens=draw(st.integers(0, 7)),
        width=draw(st.integers(1, 10_000)),
        height=draw(st.integers(1, 10_000)),
        grid=draw(st.one_of(st.none(), st.tuples(st.integers(1, 4), st.integers(1, 99), st.integers(1, 99)))),
        tiles=draw(st.one_of(st.none(), pairs)),
    )


@st.composite
def features(draw: st.DrawFn) -> Features:
    layout = draw(layouts())
    tensors = {}
    for name in draw(st.lists(names, max_size=4, unique=True)):
        dtype, shape = draw(dtypes), (layout.num_tokens, *draw(st.lists(st.integers(0, 5), max_size=2)))
        count = TensorSpec("I8", shape).nbytes * dtype.itemsize
        raw = draw(st.binary(min_size=count, max_size=count))
        flat = (
            torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        )
        tensors[name] = flat.view(dtype).reshape(shape)
    return Features(tensors, layout, draw(st.binary(min_size=32, max_size=32)))


def example() -> Features:
    torch.manual_seed(0)
    tensors = {
        "scale": torch.rand(3, 1, dtype=torch.float32),
        "rows": torch.randn(3, 5).bfloat16(),
        "deepstack.0": torch.randint(-128, 127, (3, 5), dtype=torch.int8),
        "deepstack.1": torch.randn(3, 5).to(torch.float8_e4m3fn),
    }
    return Features(tensors, Layout(3, 640, 480, grid=(1, 2, 6), tiles=(1, 1)), ENCODER)


def same(a: Features, b: Features) -> bool:
    return (
        a.layout == b.layout
        and a.fingerprint == b.fingerprint
        and a.tensors.keys() == b.tensors.keys()
        and all(
            a.tensors[n].dtype == b.tensors[n].dtype
            and a.tensors[n].shape == b.tensors[n].shape
            and bytes_of(a.tensors[n]) == bytes_of(b.tensors[n])  # bits, as NaN is none of its equals
            for n in a.tensors
        )
    )


# Round trips


@settings(deadline=None)
@given(features(), st.binary(min_size=32, max_size=32))
def test_what_goes_in_comes_out(original: Features, key: bytes) -> None:
    record = pack(key, original)
    found_key, found = unpack(record)
    assert found_key == key
    assert same(found, original)
    assert pack(key, found) == record  # one form only
    header, _, start = Header.from_bytes(record)
    assert header == original.header(key)
    assert len(record) - start == header.data_bytes == original.nbytes == found.nbytes


@settings(deadline=None)
@given(features())
def test_any_safetensors_reader_opens_a_record(original: Features) -> None:
    loaded = safetensors.torch.load(pack(KEY, original))
    assert loaded.keys() == original.tensors.keys()
    for name, tensor in original.tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert bytes_of(loaded[name]) == bytes_of(tensor)


def test_a_record_file_tells_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "record.safetensors"
    path.write_bytes(pack(KEY, example()))
    with safetensors.safe_open(path, "pt") as file:
        meta = file.metadata()
    assert meta["key"] == KEY.hex()
    assert meta["fingerprint"] == ENCODER.hex()
    assert json.loads(meta["layout"]) == {
        "num_tokens": 3,
        "width": 640,
        "height": 480,
        "grid": [1, 2, 6],
        "tiles": [1, 1],
    }
    assert len(meta["checksum"]) == 32


def test_tensors_that_are_not_contiguous_are_packed_by_value() -> None:
    wide = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    original = Features(
        {"rows": wide.t(), "slice": wide[:, :3].expand(4, 3).repeat(2, 1)[:6]}, Layout(6, 1, 1)
    )
    _, found = unpack(pack(KEY, original))
    assert torch.equal(found.rows, wide.t())
    assert torch.equal(found.tensors["slice"], original.tensors["slice"])


@given(layouts())
def test_layouts_survive_json(layout: Layout) -> None:
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


# No copies


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_reading_shares_memory_with_the_record(kind: type) -> None:
    raw = bytearray(pack(KEY, example()))
    record = raw if kind is bytearray else kind(raw)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's, of read-only buffers
        _, found = unpack(record)
    _, _, start = Header.from_bytes(record)
    base = torch.frombuffer(bytearray(record) if kind is bytes else record, dtype=torch.uint8)
    offsets = {name: begin for name, _, begin, _ in example().header(KEY).offsets()}
    if kind is not bytes:
        for name, tensor in found.tensors.items():
            assert tensor.data_ptr() == base.data_ptr() + start + offsets[name]
        raw[-1] ^= 1
        assert not same(found, example())
    storages = {tensor.untyped_storage().data_ptr() for tensor in found.tensors.values()}
    assert len(storages) == 1  # one piece of memory for all of them


def test_features_keep_their_record_alive() -> None:
    _, found = unpack(bytes(pack(KEY, example())))
    gc.collect()
    size = len(pack(KEY, example()))
    others = [b"\xff" * size for _ in range(1000)]  # would take its place
    assert len(others) == 1000
    assert same(found, example())


def test_tensors_are_aligned_to_their_elements() -> None:
    _, found = unpack(bytearray(pack(KEY, example())))
    for tensor in found.tensors.values():
        assert tensor.data_ptr() % tensor.element_size() == 0


def test_tensors_of_a_buffer_are_views() -> None:
    header = example().header(KEY)
    pieces = [bytes_of(example().tensors[name]) for name in header.specs]
    data = torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.uint8)
    found = Features(tensors_of(header, data), header.layout, header.fingerprint)
    assert same(found, example())
    assert {t.untyped_storage().data_ptr() for t in found.tensors.values()} == {data.data_ptr()}
    assert checksum(header, pieces) == checksum(header, [memoryview(b"".join(pieces))])


# Damage


def survives(record: bytes | bytearray) -> bool:
    """False if refused; whatever is let through is what was packed."""
    try:
        key, found = unpack(record)
    except RecordError:
        return False
    assert key == KEY
    assert same(found, example())
    return True


def test_every_flipped_bit_is_found() -> None:
    """All of them: in lengths, names, layout, key, checksum, padding, data."""
    record = bytearray(pack(KEY, example()))
    _, _, start = Header.from_bytes(record)
    passed = []
    for at in range(len(record)):
        for bit in range(8):
            record[at] ^= 1 << bit
            if survives(record):
                passed.append(at)
            record[at] ^= 1 << bit
    assert max(passed, default=0) < start  # another case of a hex digit at most
    assert survives(record)


@settings(deadline=None)
@given(st.data())
def test_other_damage_is_found(data: st.DataObject) -> None:
    record = bytearray(pack(KEY, example()))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(record) - 1))
        size = data.draw(st.integers(0, 9))
        record[at : at + size] = data.draw(st.binary(max_size=9))
    survives(record)


def test_truncation_at_every_length_is_found() -> None:
    record = pack(KEY, example())
    for length in range(len(record)):
        with pytest.raises(RecordError):
            unpack(record[:length])
    with pytest.raises(RecordError, match=r"\d+ bytes of tensor data where the header tells of"):
        unpack(record + b"\0")


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_noise_is_no_record(noise: bytes) -> None:
    with pytest.raises(RecordError):
        unpack(noise)


def with_header(document: object) -> bytes:
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return struct.pack("<Q", len(text)) + text


META = {"featcache": "1", "key": "00" * 32, "fingerprint": "00" * 32, "checksum": "00" * 16}
LAYOUT = '{"num_tokens": 1, "width": 1, "height": 1}'


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "not a featcache record"),
        ({"rows": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, "not a featcache record"),
        (b"[" * 500_000, "not a featcache record"),
        (
            {"__metadata__": {**META, "layout": LAYOUT, "featcache": "2"}},
            "record format '2'; this featcache reads '1'",
        ),
        ({"__metadata__": {**META, "layout": LAYOUT, "key": "00"}}, "32 bytes"),
        ({"__metadata__": {**META, "layout": LAYOUT, "key": "no"}}, "not a featcache record"),
        ({"__metadata__": {**META, "layout": "[]"}}, "layout"),
        ({"__metadata__": {**META, "layout": '{"num_tokens": 1e999, "width": 1, "height": 1}'}}, "layout"),
        (
            {
                "__metadata__": {**META, "layout": LAYOUT},
                "a": {"dtype": "F32", "shape": [1], "data_offsets": []},
            },
            "not a",
        ),
        (
            {
                "__metadata__": {**META, "layout": LAYOUT},
                "a": {"dtype": "F64", "shape": [], "data_offsets": [0, 8]},
            },
            "dtype",
        ),
        (
            {
                "__metadata__": {**META, "layout": LAYOUT},
                "a": {"dtype": "I8", "shape": [-1], "data_offsets": [0, 1]},
            },
            "shape",
        ),
        (
            {
                "__metadata__": {**META, "layout": LAYOUT},
                "a": {"dtype": "I8", "shape": [9], "data_offsets": [4, 13]},
            },
            "offsets",
        ),
        (
            {
                "__metadata__": {**META, "layout": LAYOUT},
                "a": {"dtype": "I8", "shape": [1e999], "data_offsets": [0, 1]},
            },
            "not a",
        ),
    ],
)
def test_foreign_files_are_refused_with_a_reason(document: object, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        unpack(with_header(document))


def test_plain_safetensors_files_are_no_records() -> None:
    with pytest.raises(RecordError, match="not a featcache record"):
        unpack(safetensors.torch.save({"rows": torch.zeros(2, 2)}))


def test_a_huge_header_is_not_read() -> None:
    with pytest.raises(RecordError):
        unpack(struct.pack("<Q", MAX_HEADER_BYTES + 1) + bytes(64))


def test_damaged_metadata_is_named_as_damage() -> None:
    record = bytearray(pack(KEY, example()))
    at = record.index(b'"key":"') + 7
    record[at : at + 64] = b"ff" * 32  # another image's key on this data
    with pytest.raises(RecordError, match="checksum does not match"):
        unpack(record)


# What can't be features


def test_features_check_their_tensors() -> None:
    with pytest.raises(RecordError, match="has shape \\(4, 2\\), but the layout has 3 tokens"):
        Features({"rows": torch.zeros(4, 2)}, Layout(3, 1, 1))
    with pytest.raises(RecordError, match=r"'rows' is torch\.float64; featcache stores float32, bfloat16"):
        Features({"rows": torch.zeros(3, 2, dtype=torch.float64)}, Layout(3, 1, 1))
    with pytest.raises(RecordError, match="shape"):
        Features({"rows": torch.tensor(1.0)}, Layout(1, 1, 1))
    with pytest.raises(RecordError, match="__metadata__"):
        Features({"__metadata__": torch.zeros(1, 1)}, Layout(1, 1, 1))


def test_headers_are_read_without_torch() -> None:
    """The lower half of the store has no tensors."""
    script = f"""
import sys
from featcache.features import Header
header, checksum, start = Header.from_bytes(bytes.fromhex({pack(KEY, example()).hex()!r}))
print(header.layout.num_tokens, header.data_bytes, "torch" in sys.modules, "numpy" in sys.modules)
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["3", str(example().nbytes), "False", "False"]
