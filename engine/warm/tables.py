"""Images in Parquet and Arrow tables, as Hugging Face data sets and others lay them out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from featcache.engine.warm.addresses import Addresses
from featcache.engine.warm.items import Found, PassedOver, Unreadable
from featcache.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS = 16  # read at once: an image may have megabytes
_NAMES = (
    *("image", "images", "img", "imgs", "picture", "photo", "jpg", "jpeg", "png", "webp", "image_bytes"),
    *("image_data", "image_url", "image_urls", "image_path", "image_paths", "image_base64"),
)


def table_items(source: str, path: str, kind: str, addresses: Addresses) -> Iterator[Found]:
    """The images of a table, row by row. kind: "parquet" or "arrow"."""
    import pyarrow as pa

    try:
        if kind == "parquet":
            yield from _parquet(source, path, addresses)
        else:
            yield from _arrow(source, path, addresses)
    except (pa.ArrowException, OSError, ValueError) as exc:
        yield Unreadable(source, "", ConfigError(f"{source}: the {kind} table can't be read: {_line(exc)}"))


def _parquet(source: str, path: str, addresses: Addresses) -> Iterator[Found]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # Pages are read as they are needed, instead of whole column chunks ahead.
    with pq.ParquetFile(path, memory_map=False, buffer_size=1 << 20, pre_buffer=False) as table:
        columns = image_columns(table.schema_arrow, source)
        first = 0
        for group in range(table.num_row_groups):
            row = first
            try:
                for batch in table.iter_batches(_ROWS, [group], columns, use_threads=False):
                    yield from _rows(source, batch, row, addresses)
                    row += batch.num_rows
            except (pa.ArrowException, OSError) as exc:
                error = ConfigError(f"{source}: can't be read from row {row} on: {_line(exc)}")
                yield Unreadable(source, f"row group {group}, from row {row}", error)
            first += table.metadata.row_group(group).num_rows


def _arrow(source: str, path: str, addresses: Addresses) -> Iterator[Found]:
    import pyarrow as pa

    row = 0
    with pa.memory_map(path) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        if is_file:
            reader = pa.ipc.open_file(file)
            batches = (reader.get_batch(n) for n in range(reader.num_record_batches))
        else:
            batches = reader = pa.ipc.open_stream(file)
        columns = image_columns(reader.schema, source)
        for batch in batches:
            yield from _rows(source, batch.select(columns), row, addresses)
            row += batch.num_rows


def image_columns(schema: pa.Schema, source: str) -> list[str]:
    """The columns that hold images: those that the data set itself declares, else by type, else by name.

    Raises ConfigError if there is none.
    """
    declared = [name for name in _declared(schema.metadata) if name in schema.names]
    by_type = [field.name for field in schema if _is_image_struct(field.type)]
    by_name = [name for name in schema.names if name.lower() in _NAMES]
    columns = declared or by_type or by_name
    if not columns:
        names = ", ".join(schema.names[:20]) or "none"
        raise ConfigError(
            f"{source}: no column of images; there must be one named image or images, or one of structs of "
            f"bytes and path. Its columns: {names}"
        )
    return columns


def _declared(metadata: dict[bytes, bytes] | None) -> list[str]:
    try:
        features = json.loads((metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
        return [name for name, feature in features.items() if '"Image"' in json.dumps(feature)]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []


def _is_image_struct(kind: Any) -> bool:
    import pyarrow.types as t

    while t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind):
        kind = kind.value_type
    return t.is_struct(kind) and {"bytes", "path"} <= {kind.field(i).name for i in range(kind.num_fields)}


def _rows(source: str, batch: pa.RecordBatch, first: int, addresses: Addresses) -> Iterator[Found]:
    single = batch.num_columns == 1
    for n in range(batch.num_rows):
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            member = f"row {first + n}" if single else f"row {first + n}, {name}"
            yield from cell_items(source, member, column[n].as_py(), addresses)


def cell_items(source: str, member: str, value: Any, addresses: Addresses) -> Iterator[Found]:
    """The images of a cell: bytes, an address, {"bytes", "path"}, or a list of these; None is passed over."""
    if isinstance(value, list):
        if not value:
            yield PassedOver(source, member, "is an empty list")
        for i, element in enumerate(value):
            yield from cell_items(source, f"{member}[{i}]", element, addresses)
    else:
        yield addresses.item(source, member, value)


def _line(exc: Exception) -> str:
    return (str(exc).strip() or type(exc).__name__).splitlines()[0]
