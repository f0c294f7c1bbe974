"""data: URIs as clients really write them."""

from __future__ import annotations

import binascii
from urllib.parse import unquote_to_bytes

import pybase64

from featcache.errors import RequestError

_WHITESPACE = b" \t\r\n\f\v"
_PIECE = 1 << 20
_URL_SAFE = bytes.maketrans(b"-_", b"+/")


def is_data_uri(text: str) -> bool:
    return text[:64].lstrip()[:5].lower() == "data:"


def decode_data_uri(uri: str, where: str) -> bytes:
    """The bytes of a data: URI. `where` is what an error names.

    Any case (`DATA:`, `Image/PNG`, `;BASE64`), other parameters before `;base64`, line breaks, the URL-safe
    alphabet, percent-encoding and missing padding are taken. The media type isn't looked at: the bytes tell.

    Raises RequestError if it can't be decoded, or holds nothing.
    """
    head, comma, payload = uri.lstrip().partition(",")
    if not comma:
        raise RequestError(f"{where}: a data: URI without a comma, after which its data would stand")
    parameters = [parameter.strip().lower() for parameter in head.split(";")[1:]]
    data = unquote_to_bytes(payload)
    if "base64" in parameters:
        data = _decode_base64(data, where)
    if not data:
        raise RequestError(f"{where}: a data: URI that holds no data")
    return data


def decode_base64(text: str, where: str) -> bytes:
    """Bare base64. Raises RequestError if it isn't, or holds nothing."""
    data = _decode_base64(text.encode("utf-8", "surrogatepass"), where)
    if not data:
        raise RequestError(f"{where}: base64 that holds no data")
    return data


def _decode_base64(data: bytes, where: str) -> bytes:
    """In pieces: all of this keeps the GIL, and other threads have to go on beside a large image."""
    data = data.rstrip(_WHITESPACE + b"=")
    decoded: list[bytes] = []
    rest = b""
    try:
        for start in range(0, len(data), _PIECE):
            digits = rest + data[start : start + _PIECE].translate(_URL_SAFE, _WHITESPACE)
            whole = len(digits) - len(digits) % 4
            decoded.append(_whole_groups(digits[:whole]))
            rest = digits[whole:]
        decoded.append(pybase64.b64decode(rest + b"=" * (-len(rest) % 4), validate=True))
    except binascii.Error as exc:
        raise RequestError(f"{where}: its base64 can't be decoded: {exc}") from exc
    return b"".join(decoded)


def _whole_groups(digits: bytes) -> bytes:
    if b"=" in digits:
        raise binascii.Error("padding in the middle")
    return pybase64.b64decode(digits, validate=True)
