"""`Features`: what the language model receives for one image, and its form on disk.

A record is the bytes of one safetensors file: any safetensors reader opens it. Its `__metadata__` holds the
key, the encoder's fingerprint, the layout and a checksum (xxh3-128) over all of these and the tensor data.
Nothing here imports torch before a tensor is asked for.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from featcache.errors import RecordError

if TYPE_CHECKING:
    import torch

FORMAT_VERSION = "1"
DIGEST_BYTES = 32
MAX_HEADER_BYTES = 1 << 20  # a header holds a few tensors' names and one layout: anything larger is not ours

# safetensors name -> (torch name, bytes per element)
DTYPES: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "F32": ("float32", 4),
        "BF16": ("bfloat16", 2),
        "F16": ("float16", 2),
        "I8": ("int8", 1),
        "F8_E4M3": ("float8_e4m3fn", 1),
        "F8_E5M2": ("float8_e5m2", 1),
    }
)
_SAFETENSORS_NAME = {torch_name: name for name, (torch_name, _) in DTYPES.items()}


@cache
def _safetensors_name(dtype: torch.dtype) -> str | None:
    return _SAFETENSORS_NAME.get(str(dtype).removeprefix("torch."))


@dataclass(frozen=True, slots=True)
class Layout:
    """What the prompt needs to know of an image without its pixels.

    num_tokens: rows of every tensor, which is also the number of placeholder tokens.
    width, height: of the upright original, in pixels.
    grid: (frames, rows, columns) of patches, for families that position images by a grid (Qwen-VL).
    tiles: (rows, columns) of tiles, for families that cut images up; (1, 1) if uncut, None if they never do.
    """

    num_tokens: int
    width: int
    height: int
    grid: tuple[int, int, int] | None = None
    tiles: tuple[int, int] | None = None

    def to_json(self) -> dict[str, Any]:
        doc: dict[str, Any] = {"num_tokens": self.num_tokens, "width": self.width, "height": self.height}
        if self.grid is not None:
            doc["grid"] = list(self.grid)
        if self.tiles is not None:
            doc["tiles"] = list(self.tiles)
        return doc

    @classmethod
    def from_json(cls, doc: Mapping[str, Any]) -> Layout:
        try:
            grid, tiles = doc.get("grid"), doc.get("tiles")
            return cls(
                num_tokens=int(doc["num_tokens"]),
                width=int(doc["width"]),
                height=int(doc["height"]),
                grid=None if grid is None else (int(grid[0]), int(grid[1]), int(grid[2])),
                tiles=None if tiles is None else (int(tiles[0]), int(tiles[1])),
            )
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as exc:
            raise RecordError(f"layout is not one: {exc!r}") from exc


class TensorSpec(NamedTuple):
    """dtype (a safetensors name, see DTYPES) and shape of one tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][1]


@dataclass(frozen=True, slots=True)
class Header:
    """All of a record but its tensor data.

    specs are in the order of the data: wider elements first, so that each tensor is aligned to its element.
    data_bytes: of all tensors together.
    """

    key: bytes
    fingerprint: bytes
    layout: Layout
    specs: Mapping[str, TensorSpec]
    data_bytes: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "data_bytes", sum(spec.nbytes for spec in self.specs.values()))

    @classmethod
    def of(cls, key: bytes, fingerprint: bytes, layout: Layout, specs: Mapping[str, TensorSpec]) -> Header:
        order = sorted(specs, key=lambda name: (-DTYPES[specs[name].dtype][1], name))
        return cls(key, fingerprint, layout, {name: specs[name] for name in order})

    def offsets(self) -> Iterator[tuple[str, TensorSpec, int, int]]:
        """(name, spec, begin, end) of each tensor within the data."""
        begin = 0
        for name, spec in self.specs.items():
            yield name, spec, begin, begin + spec.nbytes
            begin += spec.nbytes

    def _identity(self) -> dict[str, str]:
        return {
            "featcache": FORMAT_VERSION,
            "key": self.key.hex(),
            "fingerprint": self.fingerprint.hex(),
            "layout": json.dumps(self.layout.to_json(), sort_keys=True, separators=(",", ":")),
        }

    def hasher(self) -> xxhash.xxh3_128:
        """A checksum that has taken in the header; feed it the tensor data in order."""
        specs = [[name, spec.dtype, list(spec.shape)] for name, spec in self.specs.items()]
        text = json.dumps([self._identity(), specs], sort_keys=True, separators=(",", ":"))
        return xxhash.xxh3_128(text.encode())

    def to_bytes(self, checksum: bytes) -> bytes:
        """The head of the safetensors file: length, JSON, padding to 8 bytes."""
        doc: dict[str, Any] = {"__metadata__": {**self._identity(), "checksum": checksum.hex()}}
        for name, spec, begin, end in self.offsets():
            doc[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [begin, end]}
        text = json.dumps(doc, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    @classmethod
    def from_bytes(cls, head: bytes | bytearray | memoryview) -> tuple[Header, bytes, int]:
        """Parse the head of a record.

        Returns (header, checksum, offset of the tensor data).
        Raises RecordError if these are not the first bytes of a record of this format.
        """
        if len(head) < 8:
            raise RecordError(f"{len(head)} bytes are too few for a record")
        (size,) = struct.unpack_from("<Q", head)
        if size > MAX_HEADER_BYTES or len(head) < 8 + size:
            raise RecordError("not a safetensors file, or cut short")
        try:
            doc = json.loads(bytes(head[8 : 8 + size]))
            meta = doc.pop("__metadata__")
            version = meta["featcache"]
            if version != FORMAT_VERSION:
                raise RecordError(f"record format {version!r}; this featcache reads {FORMAT_VERSION!r}")
            layout = Layout.from_json(json.loads(meta["layout"]))
            key, fingerprint, checksum = (bytes.fromhex(meta[k]) for k in ("key", "fingerprint", "checksum"))
            specs = {n: TensorSpec(str(d["dtype"]), tuple(map(int, d["shape"]))) for n, d in doc.items()}
            bounds = {n: (d["data_offsets"][0], d["data_offsets"][1]) for n, d in doc.items()}
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as exc:
            raise RecordError(f"a safetensors file, but not a featcache record: {exc!r}") from exc
        if len(key) != DIGEST_BYTES or len(fingerprint) != DIGEST_BYTES:
            raise RecordError(f"its key or fingerprint is not of {DIGEST_BYTES} bytes")
        if any(spec.dtype not in DTYPES or min(spec.shape, default=0) < 0 for spec in specs.values()):
            raise RecordError("holds a tensor of a dtype or shape that featcache never writes")
        header = cls.of(key, fingerprint, layout, specs)
        if any(bounds[name] != (begin, end) for name, _, begin, end in header.offsets()):
            raise RecordError("tensor offsets are not those that featcache writes")
        return header, checksum, 8 + size


@dataclass(frozen=True, slots=True)
class Features:
    """What the language model receives for one image.

    tensors: by name, each (num_tokens, hidden) and contiguous; "rows" always, "deepstack.0", … for models
        that feed several levels.
    layout: see Layout.
    fingerprint: 32 bytes, of the encoder that made them.
    """

    tensors: Mapping[str, torch.Tensor]
    layout: Layout
    fingerprint: bytes = field(default=bytes(DIGEST_BYTES), repr=False)

    def __post_init__(self) -> None:
        for name, tensor in self.tensors.items():
            if _safetensors_name(tensor.dtype) is None:
                known = ", ".join(_SAFETENSORS_NAME)
                raise RecordError(f"tensor {name!r} is {tensor.dtype}; featcache stores {known}")
            if name == "__metadata__":
                raise RecordError(
                    "a tensor can't be called '__metadata__', which safetensors keeps for itself"
                )
            if tensor.ndim < 1 or tensor.shape[0] != self.layout.num_tokens:
                raise RecordError(
                    f"tensor {name!r} has shape {tuple(tensor.shape)}, "
                    f"but the layout has {self.layout.num_tokens} tokens"
                )

    @property
    def rows(self) -> torch.Tensor:
        """(num_tokens, hidden): what replaces the placeholder embeddings."""
        return self.tensors["rows"]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def header(self, key: bytes) -> Header:
        specs = {}
        for name, tensor in self.tensors.items():
            dtype = _safetensors_name(tensor.dtype)
            assert dtype is not None, tensor.dtype
            specs[name] = TensorSpec(dtype, tuple(tensor.shape))
        return Header.of(key, self.fingerprint, self.layout, specs)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous host tensor of any dtype, without a copy."""
    import torch

    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def tensors_of(header: Header, data: torch.Tensor) -> dict[str, torch.Tensor]:
    """Views of `data` (uint8, 1-D, host or device) as the tensors that `header` tells of."""
    import torch

    return {
        name: data[begin:end].view(getattr(torch, DTYPES[spec.dtype][0])).reshape(spec.shape)
        for name, spec, begin, end in header.offsets()
    }


def checksum(header: Header, data: Iterable[memoryview]) -> bytes:
    """xxh3-128 over the header and the tensor data, given in pieces and in order."""
    hasher = header.hasher()
    for piece in data:
        hasher.update(piece)
    return hasher.digest()


def pack(key: bytes, features: Features) -> bytes:
    """The record of host features as the bytes of a safetensors file."""
    header = features.header(key)
    pieces = [bytes_of(features.tensors[name].contiguous()) for name in header.specs]
    return b"".join([header.to_bytes(checksum(header, pieces)), *pieces])


def unpack(record: bytes | bytearray | memoryview) -> tuple[bytes, Features]:
    """(key, features) of a record; the tensors are views of `record`, not to be written to if it is `bytes`.

    Raises RecordError if the record is cut short, damaged, or not one.
    """
    header, expected, start = Header.from_bytes(record)
    data = memoryview(record)[start:]
    if len(data) != header.data_bytes:
        raise RecordError(f"{len(data)} bytes of tensor data where the header tells of {header.data_bytes}")
    if checksum(header, [data]) != expected:
        raise RecordError("checksum does not match: the record is damaged")
    return header.key, Features(tensors_of(header, _shared(data)), header.layout, header.fingerprint)


def _shared(data: memoryview) -> torch.Tensor:
    """`data` as a uint8 tensor without a copy, and without torch's warning that it is read-only."""
    import numpy
    import torch

    array = numpy.frombuffer(data, numpy.uint8)
    interface = {**array.__array_interface__, "data": (array.ctypes.data, False)}
    owner = SimpleNamespace(__array_interface__=interface, array=array)  # numpy keeps it, and it the buffer
    return torch.from_numpy(numpy.asarray(owner))
