"""Reads plain data out of a pickle and executes nothing.

Python's own unpickler calls functions that the file names. This reader interprets the opcodes itself and accepts only
those that plain data and NumPy arrays need. A function in the file is only a name here: it is compared with a list and
never looked up. No NumPy object is made before its parts are checked.
"""

from __future__ import annotations

import io
import math
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ARRAY = {"numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"}
_ARRAY_OF_BUFFER = {"numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer"}  # protocol 5
_DTYPE = "numpy.dtype"
_BYTES = "_codecs.encode"  # bytes, as Python 3 writes them in protocol 2
_NAMES = {*_ARRAY, *_ARRAY_OF_BUFFER, _DTYPE, _BYTES, "numpy.ndarray"}
_UNSIGNED_BYTE = ("u1", "|u1")

_VALUES = {  # opcodes that carry their value
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINSTRING", "SHORT_BINSTRING", "BINUNICODE", "SHORT_BINUNICODE"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_DICT": dict,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_OTHERS = {
    *("PROTO", "FRAME", "STOP", "MARK", "POP", "TUPLE", "APPEND", "APPENDS", "SETITEM", "SETITEMS"),
    *("BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET", "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD"),
}
_KNOWN = {*_VALUES, *_CONSTANTS, *_TUPLES, *_OTHERS}
# The arguments of all other opcodes are not decoded.
_OPCODES = {opcode.code.encode("latin-1"): opcode for opcode in pickletools.opcodes if opcode.name in _KNOWN}
_MOST_NAME_BYTES = 200
_MOST_OPCODES = 2_000_000  # the files of CIFAR-10 have about 50,000
_MARK = object()


class UnreadablePickle(Exception):
    """The file is damaged, or holds something other than plain data."""


@dataclass(frozen=True)
class _Name:
    """A function or class that the file names."""

    text: str


@dataclass
class _Call:
    """A call that the file asks for, and the state of the object that it would return."""

    function: str
    arguments: tuple[Any, ...]
    state: Any = None


def read_pickle(path: Path, most_bytes: int) -> Any:
    """Dictionaries, lists, tuples, numbers, text and bytes; arrays are for `array_of_bytes`."""
    with path.open("rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise UnreadablePickle(f"more than {most_bytes:,} bytes")
    try:
        return _Reader().read(data)
    except UnreadablePickle:
        raise
    # For a damaged file pickletools raises these, and so does this reader for values of the wrong type.
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise UnreadablePickle(str(error)[:200] or type(error).__name__) from error


def array_of_bytes(value: Any, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """A value of `read_pickle` as an array of unsigned bytes of exactly this shape."""
    if not isinstance(value, _Call):
        raise UnreadablePickle(f"{type(value).__name__} instead of an array")
    if value.function in _ARRAY_OF_BUFFER:
        data, dtype, found, order = _parts(value.arguments, 4)
        is_by_column = order != "C"
    elif value.function in _ARRAY:
        _, found, dtype, is_by_column, data = _parts(value.state, 5)
    else:
        raise UnreadablePickle(f"{value.function} instead of an array")
    if found != shape or is_by_column:
        raise UnreadablePickle(f"an array of shape {_short(found)}, expected {shape} by row")
    is_dtype = isinstance(dtype, _Call) and dtype.function == _DTYPE
    if not is_dtype or dtype.arguments[:1] not in [(name,) for name in _UNSIGNED_BYTE]:
        raise UnreadablePickle("the array does not hold unsigned bytes")
    content = _as_bytes(data)
    if len(content) != math.prod(shape):
        raise UnreadablePickle(f"an array of {len(content):,} bytes, expected {math.prod(shape):,}")
    return np.frombuffer(content, np.uint8).reshape(shape)


def _parts(value: Any, count: int) -> tuple[Any, ...]:
    if not isinstance(value, tuple) or len(value) != count:
        raise UnreadablePickle("an array whose parts are missing")
    return value


def _as_bytes(data: Any) -> bytes:
    if isinstance(data, _Call) and data.function == _BYTES and data.arguments[1:] in ((), ("latin1",), ("latin-1",)):
        data = data.arguments[0] if data.arguments else None
    if isinstance(data, str):  # a string of Python 2: a character for each byte
        try:
            return data.encode("latin-1")
        except UnicodeEncodeError as error:
            raise UnreadablePickle("text in place of bytes") from error
    if not isinstance(data, bytes | bytearray):
        raise UnreadablePickle(f"{type(data).__name__} in place of bytes")
    return bytes(data)


def _short(value: Any) -> str:
    is_shape = isinstance(value, tuple) and len(value) < 8 and all(isinstance(size, int) for size in value)
    return str(value) if is_shape else "unknown"


class _Reader:
    """A stack machine without calls."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._actions: dict[str, Callable[[Any], None]] = {
            "PROTO": lambda _: None,
            "FRAME": lambda _: None,
            "MARK": lambda _: self._stack.append(_MARK),
            "POP": lambda _: self._pop(),
            "BINPUT": self._remember,
            "LONG_BINPUT": self._remember,
            "MEMOIZE": lambda _: self._remember(len(self._memo)),
            "BINGET": lambda key: self._stack.append(self._memo[key]),
            "LONG_BINGET": lambda key: self._stack.append(self._memo[key]),
            "TUPLE": lambda _: self._stack.append(tuple(self._pop_marked())),
            "APPEND": lambda _: self._extend([self._pop()]),
            "APPENDS": lambda _: self._extend(self._pop_marked()),
            "SETITEM": lambda _: self._update([self._pop(), self._pop()][::-1]),
            "SETITEMS": lambda _: self._update(self._pop_marked()),
            "STACK_GLOBAL": lambda _: self._name(*[self._pop(), self._pop()][::-1]),
            "REDUCE": lambda _: self._call(),
            "BUILD": lambda _: self._set_state(),
        }

    def read(self, data: bytes) -> Any:
        file = io.BytesIO(data)
        opcodes = 0
        while code := file.read(1):
            opcodes += 1
            if opcodes > _MOST_OPCODES:  # an opcode of one byte can make an object of sixty
                raise UnreadablePickle(f"more than {_MOST_OPCODES:,} opcodes")
            opcode = _OPCODES.get(code)
            if opcode is None:
                raise UnreadablePickle(f"the opcode {code!r}, which plain data does not need")
            name = opcode.name
            if name == "GLOBAL":  # pickletools would interpret escape sequences in it
                self._name(*(file.readline(_MOST_NAME_BYTES).decode("ascii").rstrip("\n") for _ in range(2)))
                continue
            value = opcode.arg.reader(file) if opcode.arg is not None else None
            if name in _VALUES:
                self._stack.append(value)
            elif name in _CONSTANTS:
                self._stack.append(_CONSTANTS[name]())
            elif name in _TUPLES:
                self._stack.append(tuple([self._pop() for _ in range(_TUPLES[name])][::-1]))
            elif name == "STOP":
                return self._pop()
            else:
                self._actions[name](value)
        raise UnreadablePickle("the file ends too early")

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise UnreadablePickle("a value is missing")
        return value

    def _pop_marked(self) -> list[Any]:
        """The values above the last mark."""
        values = []
        while (value := self._stack.pop()) is not _MARK:
            values.append(value)
        return values[::-1]

    def _remember(self, key: int) -> None:
        self._memo[key] = self._stack[-1]

    def _extend(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, list):
            raise UnreadablePickle("values are added to something that is not a list")
        target.extend(values)

    def _update(self, items: list[Any]) -> None:
        """Keys are text, strings of Python 2, or bytes."""
        target = self._stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise UnreadablePickle("a damaged dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_as_bytes(key).decode("latin-1")] = value

    def _name(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise UnreadablePickle("a function without a name")
        text = f"{module}.{name}"
        if text not in _NAMES:
            raise UnreadablePickle(f"it would execute {text[:80]}")
        self._stack.append(_Name(text))

    def _call(self) -> None:
        arguments, function = self._pop(), self._pop()
        if not isinstance(arguments, tuple) or not isinstance(function, _Name):
            raise UnreadablePickle("a call of something that is not a function")
        self._stack.append(_Call(function.text, arguments))

    def _set_state(self) -> None:
        state, target = self._pop(), self._stack[-1]
        if not isinstance(target, _Call):
            raise UnreadablePickle("a state for something that is not an object")
        target.state = state
