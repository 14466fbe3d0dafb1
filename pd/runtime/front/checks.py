"""Checks of what a client sent, each with the same words: the field, what was expected, what was given. Pure."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from pd.runtime.front.errors import RequestError

Number = TypeVar("Number", int, float)
Asked = TypeVar("Asked", bound=msgspec.Struct)


def decode(body: bytes, shape: type[Asked]) -> Asked:
    """Raises RequestError saying where the body is not UTF-8, not JSON, or not of this shape."""
    try:
        body.decode()  # msgspec looks only into strings of known fields
        return msgspec.json.decode(body, type=shape)
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the body is not UTF-8: byte 0x{body[error.start]:02x} at offset {error.start}", code="invalid_utf8"
        ) from error
    except msgspec.ValidationError as error:
        raise wrong_type(str(error)) from error
    except msgspec.DecodeError as error:
        raise RequestError(f"the body is not JSON: {_no_json(body, str(error))}", code="invalid_json") from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply", code="invalid_json") from error


_HALF_PAIR = re.compile(rb"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2})(?!\\u[dD][c-fC-F])")


def _no_json(body: bytes, fault: str) -> str:
    """msgspec's words, `Input data was truncated`, as a person would say it."""
    if not body.strip():
        return "it is empty"
    if "(byte" in fault:
        return fault.removeprefix("JSON is malformed: ")
    if half := _HALF_PAIR.search(body):  # msgspec looks for the other half wherever the string goes on
        return f"{half[1].decode()} is half of a surrogate pair (byte {half.start(1)})"
    return f"it ends too early, after {len(body)} bytes"


_FAULT = re.compile(r"(?P<fault>.*?) - at (?P<key>`key` in )?`\$\.?(?P<field>.*)`", re.DOTALL)


def wrong_type(fault: str, field: str = "") -> RequestError:
    """msgspec's words, `Expected `int`, got `str` - at `$.n``, as ours: n: expected int, got str."""
    match = _FAULT.fullmatch(fault)
    if match is not None:
        field += match["field"]
        fault = match["fault"]
    words = fault.replace("`", "").replace(" | ", " or ")
    where = f"a key of {field}" if match and match["key"] else field or "the body"
    return RequestError(f"{where}: {words[0].lower()}{words[1:]}", code="invalid_type", param=field or None)


def within(field: str, value: Number | None, low: float, high: float) -> Number | None:
    """The value, or None where none was given. Both ends are allowed."""
    if value is not None and not low <= value <= high:
        raise out_of_range(field, value, f"between {low} and {high}")
    return value


def out_of_range(field: str, value: float, allowed: str) -> RequestError:
    return RequestError(f"{field} must be {allowed}, got {show(value)}", code="out_of_range", param=field)


def unsupported(field: str, why: str) -> RequestError:
    return RequestError(f"{field}: {why}", code="unsupported", param=field)


_NOTHING = {b"null", b"false", b'""', b"[]", b"{}", b"0"}


def asks_nothing(raw: msgspec.Raw) -> bool:
    """Whether a field's JSON is one that changes nothing wherever it is given."""
    return bytes(raw).strip() in _NOTHING


def show(value: object) -> str:
    """A client's value in a message: short, and without Python's limit on the digits of an int."""
    if isinstance(value, int) and abs(value) >= 10**20:
        return "an integer of more than 20 digits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
