"""Mutations of files, as a pure function of a random generator: the same seed gives the same bytes.

A mutation either knows the structure (JSON, YAML, a safetensors header) and changes a value, a name or the nesting, or
it changes bytes. Structured mutations reach the code behind the parser; bytes test the parser itself.
"""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable
from random import Random
from typing import Any

Mutate = Callable[[bytes, Random], bytes]

OUTSIDE = "outside/secret.txt"  # is next to the folder of a case; no reader may open it
_NUMBERS: tuple[float, ...] = (
    0,
    -1,
    1,
    2,
    255,
    2**31,
    2**32,
    2**53 + 1,
    2**63 - 1,
    2**63,
    -(2**63) - 1,
    10**30,
    10**400,
    1e308,
    -1e308,
)
_NUMBERS += (0.5, -0.0, 1e-320, float("nan"), float("inf"), float("-inf"))
_TEXTS = (
    *(
        "",
        " ",
        "\n",
        "\0",
        "\x1b[31m",
        "\x1b]0;title\x07",
        "a\r\nb",
        "\u202e",
        "\ud800",
        "\ufeff",
        "é" * 40,
        "字",
        "😀",
    ),
    *("nan", "inf", "-inf", "1e999", "1_000", "0x10", "-1", "١", "true", "null", "None", "{}", "[]", "{x:>999999999}"),
    *("%s%n", "{0.__class__}", "'", '"', "\\", "<script>", "]]>", "x" * 5000, "-" * 70, "--help", "-o/tmp/x", "$(id)"),
    *(
        "../" + OUTSIDE,
        "../../" + OUTSIDE,
        "/etc/passwd",
        "/dev/zero",
        "~",
        ".",
        "..",
        "/",
        "con",
        "a/b",
        "file:///etc",
    ),
    *("2026-13-45T99:99:99", "9999-12-31T23:59:59+00:00", "0001-01-01T00:00:00+23:59", "2026-01-01"),
)
_NAMES = ("__class__", "__metadata__", "step", "path", "self", "", "\0", "a" * 300, "../" + OUTSIDE, "é", "kind")
_DEEP = 3000  # levels of nesting: more than the interpreter's stack


def mutate_bytes(data: bytes, draw: Random) -> bytes:
    """One to four changes of bytes: flips, cuts, insertions, repeats, and runs of one value."""
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        data = draw.choice(_BYTE_CHANGES)(data, draw)
    return data


def mutate_json(data: bytes, draw: Random) -> bytes:
    """A JSON document with one to three changes in its structure, or in its bytes."""
    return _mutate_json_text(data, draw)


def mutate_json_lines(data: bytes, draw: Random) -> bytes:
    """A file with one JSON document to a line."""
    lines = data.splitlines()
    action = draw.randrange(6)
    if action == 0:
        return mutate_bytes(data, draw)
    if action == 1:
        lines.append(draw.choice((b"", b"[]", b"3", b"null", b'"x"', b"{}", b"\xff\xfe", b'{"kind": "step"}')))
    if action == 2:
        draw.shuffle(lines)
    for _ in range(draw.choice((1, 1, 2))):
        place = draw.randrange(len(lines))
        lines[place] = _mutate_json_text(lines[place], draw)
    return b"\n".join(lines) + draw.choice((b"\n", b"\n", b""))


def mutate_yaml(data: bytes, draw: Random) -> bytes:
    """Lines of `name: value` with changed values, names, indents, anchors, tags and nesting, or changed bytes."""
    if draw.randrange(5) == 0:
        return mutate_bytes(data, draw)
    lines = data.decode().splitlines() or [""]
    for _ in range(draw.choice((1, 1, 2, 3))):
        place = draw.randrange(len(lines))
        name, _, value = lines[place].partition(":")
        lines[place : place + 1] = draw.choice(_YAML_CHANGES)(name, value, draw)
        lines = lines or [""]
    return "\n".join(lines).encode(errors="surrogatepass")


def mutate_csv(data: bytes, draw: Random) -> bytes:
    """A table with changed cells, rows and columns."""
    if draw.randrange(4) == 0:
        return mutate_bytes(data, draw)
    rows = [line.split(",") for line in data.decode().splitlines()]
    for _ in range(draw.choice((1, 1, 2, 4))):
        row = draw.choice(rows)
        place = draw.randrange(len(row)) if row else 0
        action = draw.randrange(5)
        if action == 0 and row:
            del row[place]
        elif action == 1:
            row.insert(place, _text(draw))
        elif action == 2 and len(rows) > 1:
            rows.remove(row)
        elif action == 3:
            rows.insert(draw.randrange(len(rows) + 1), list(row))
        elif row:
            row[place] = draw.choice((_text(draw), str(_number(draw)), '"' + row[place], row[place] + "\n"))
    return ("\n".join(",".join(row) for row in rows) + "\n").encode(errors="surrogatepass")


def mutate_safetensors(data: bytes, draw: Random) -> bytes:
    """A safetensors file with a changed header, a changed length of it, or changed bytes."""
    action = draw.randrange(5)
    if action == 0:
        return mutate_bytes(data, draw)
    (length,) = struct.unpack("<Q", data[:8])
    header, values = data[8 : 8 + length], data[8 + length :]
    if action == 1:
        wrong = draw.choice((0, 1, length - 1, length + 1, len(data), 2**31, 2**63, 2**64 - 1))
        return struct.pack("<Q", wrong) + header + values
    if action == 2:
        header = _mutate_offsets(header, draw)
    else:
        header = _mutate_json_text(header, draw)
    if draw.randrange(4) == 0:
        values = mutate_bytes(values, draw)
    return struct.pack("<Q", len(header)) + header + values


def _mutate_offsets(header: bytes, draw: Random) -> bytes:
    """Shapes, types and offsets that contradict each other: the most important values of a header."""
    entries = json.loads(header)
    entry = entries[draw.choice([name for name in entries if name != "__metadata__"])]
    start, end = entry["data_offsets"]
    change = draw.choice(("shift", "swap", "shape", "dtype", "overlap"))
    if change == "shift":
        entry["data_offsets"] = [start + draw.choice((-4, 4, 1, 2**40)), end + draw.choice((-4, 4, 0, 2**62))]
    elif change == "swap":
        entry["data_offsets"] = [end, start]
    elif change == "shape":
        entry["shape"] = draw.choice(([], [0], [-1], [2**62], [2**32, 2**32], [1] * 80, [*entry["shape"], 1], [1.5]))
    elif change == "dtype":
        entry["dtype"] = draw.choice(("F64", "F16", "BOOL", "U8", "F8_E4M3", "C64", "nothing", "", "I64"))
    else:
        entry["data_offsets"] = draw.choice(list(entries.values())).get("data_offsets", [0, 0])
    return json.dumps(entries).encode()


# --- JSON -------------------------------------------------------------------------------------------------------------


def _mutate_json_text(data: bytes, draw: Random) -> bytes:
    action = draw.randrange(8)
    if action == 0:
        return mutate_bytes(data, draw)
    if action == 1:
        return draw.choice(_TEXT_TRICKS)(data, draw)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):  # an earlier mutation of the same text
        return mutate_bytes(data, draw)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        value = change_value(value, draw)
    return json.dumps(value, indent=draw.choice((None, None, 1))).encode(errors="surrogatepass")


def change_value(value: Any, draw: Random) -> Any:
    """Change a part of a value, or the value itself."""
    places = list(_places(value))
    if not places or draw.randrange(40) == 0:
        return _any(draw)
    parent, key = draw.choice(places)
    action = draw.randrange(7)
    if action == 0:
        del parent[key]
    elif action == 1 and isinstance(parent, dict):
        parent[draw.choice(_NAMES)] = parent.pop(key)
    elif action == 2 and isinstance(parent, list):
        parent.insert(key, _any(draw))
    elif action == 3 and isinstance(parent, dict):
        parent[draw.choice(_NAMES)] = _any(draw)
    elif action == 4:
        parent[key] = draw.choice(([parent[key]], {"value": parent[key]}, str(parent[key])))
    elif action == 5:
        parent[key] = copy.deepcopy(draw.choice(places)[0])
    else:
        parent[key] = _any(draw)
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        item = waiting.pop()
        keys = list(item) if isinstance(item, dict) else range(len(item)) if isinstance(item, list) else ()
        for key in keys:
            found.append((item, key))
            waiting.append(item[key])
    return found


def _any(draw: Random) -> Any:
    """A value of any kind that JSON has, and that Python's reader accepts."""
    kind = draw.randrange(6)
    if kind == 0:
        return draw.choice((None, True, False))
    if kind == 1:
        return _number(draw)
    if kind == 2:
        return _text(draw)
    if kind == 3:
        return [_number(draw) for _ in range(draw.choice((0, 1, 2, 5, 200)))]
    if kind == 4:
        return {
            draw.choice(_NAMES): draw.choice((_text(draw), _number(draw), [], {})) for _ in range(draw.randrange(4))
        }
    return draw.choice(([], {}, [[]], [{}], [None], {"": None}, [[1, 2], [3]], ["a", 1]))


def _number(draw: Random) -> float:
    return draw.choice(_NUMBERS) if draw.randrange(3) else draw.randint(-1000, 100000)


def _text(draw: Random) -> str:
    return draw.choice(_TEXTS)


def _deep(data: bytes, draw: Random) -> bytes:
    opening, closing = draw.choice(((b"[", b"]"), (b'{"a":', b"}")))
    return opening * _DEEP + b"1" + closing * (_DEEP if draw.randrange(2) else 0)


def _deep_inside(data: bytes, draw: Random) -> bytes:
    place = data.rfind(b"}")
    return data[:place] + b', "deep": ' + b"[" * _DEEP + b"]" * _DEEP + data[place:] if place > 0 else data


def _duplicate_names(data: bytes, draw: Random) -> bytes:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):  # an earlier mutation of the same text
        return data
    if not isinstance(value, dict) or not value:
        return data
    name = draw.choice(list(value))
    return data[: data.rfind(b"}")] + f", {json.dumps(name)}: {json.dumps(_any(draw))}}}".encode(errors="surrogatepass")


def _other_encoding(data: bytes, draw: Random) -> bytes:
    text = data.decode(errors="replace")
    return draw.choice((text.encode("utf-16"), b"\xef\xbb\xbf" + data, text.encode("utf-32"), b"\0" * len(data)))


def _long_number(data: bytes, draw: Random) -> bytes:
    """More digits than Python converts, or an exponent beyond a float."""
    number = draw.choice((b"9" * 5000, b"1e99999", b"-" + b"9" * 4000, b"0." + b"1" * 5000))
    digits = [place for place, byte in enumerate(data) if byte in b"0123456789"]
    place = draw.choice(digits) if digits else len(data)
    return data[:place] + number + data[place + 1 :]


_TEXT_TRICKS = (_deep, _deep_inside, _duplicate_names, _other_encoding, _long_number)


# --- Bytes ------------------------------------------------------------------------------------------------------------


def _flip(data: bytes, draw: Random) -> bytes:
    if not data:
        return b"\x01"
    place = draw.randrange(len(data))
    return data[:place] + bytes([data[place] ^ (1 << draw.randrange(8))]) + data[place + 1 :]


def _replace(data: bytes, draw: Random) -> bytes:
    place = draw.randrange(len(data) + 1)
    return data[:place] + bytes([draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))]) + data[place + 1 :]


def _cut(data: bytes, draw: Random) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def _drop(data: bytes, draw: Random) -> bytes:
    start = draw.randrange(len(data) + 1)
    return data[:start] + data[start + draw.choice((1, 2, 8, 64)) :]


def _insert(data: bytes, draw: Random) -> bytes:
    place = draw.randrange(len(data) + 1)
    return data[:place] + draw.randbytes(draw.choice((1, 4, 64))) + data[place:]


def _splice(data: bytes, draw: Random) -> bytes:
    """Copy a part of the file to another place."""
    start, place = draw.randrange(len(data) + 1), draw.randrange(len(data) + 1)
    return data[:place] + data[start : start + draw.choice((4, 32, 256))] + data[place:]


def _word(data: bytes, draw: Random) -> bytes:
    """Replace a size of four or eight bytes, in either byte order, by an extreme one."""
    form = draw.choice(("<I", ">I", "<Q", ">Q", "<H", ">H"))
    width = struct.calcsize(form)
    value = draw.choice((0, 1, 2 ** (8 * width) - 1, 2 ** (8 * width - 1), 2 ** (8 * width - 1) - 1))
    place = draw.randrange(max(1, len(data) - width))
    return data[:place] + struct.pack(form, value) + data[place + width :]


_BYTE_CHANGES = (_flip, _flip, _replace, _replace, _cut, _drop, _insert, _splice, _word)


# --- YAML -------------------------------------------------------------------------------------------------------------


def _yaml_value(name: str, value: str, draw: Random) -> list[str]:
    choices = (
        _text(draw),
        str(_number(draw)),
        "{}",
        "[]",
        "[[1, 2], {a: b}]",
        "~",
        "yes",
        "0o17",
        "1:30:00",
        "!!int x",
    )
    return [f"{name}: {draw.choice(choices)}"]


def _yaml_nested(name: str, value: str, draw: Random) -> list[str]:
    opening, closing = draw.choice((("[", "]"), ("{a: ", "}")))
    depth = draw.choice((3, 50, _DEEP))
    return [f"{name}: {opening * depth}{closing * depth}"]


def _yaml_bomb(name: str, value: str, draw: Random) -> list[str]:
    """Aliases of aliases: ten lines that expand to a billion values."""
    lines = ["x0: &x0 [a, a, a, a, a, a, a, a, a]"]
    lines += [f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]" for n in range(1, 10)]
    return [*lines, f"{name}: *x9"] if draw.randrange(2) else [f"{name}: &a [*a, *a]"]


def _yaml_flat_bomb(name: str, value: str, draw: Random) -> list[str]:
    inner = ", ".join(f"&b{n} [{', '.join([f'*b{n - 1}'] * 9)}]" for n in range(1, 10))
    return [f"{name}: [&b0 [a, a, a, a, a, a, a, a, a], {inner}]"]


_YAML_CHANGES: tuple[Callable[[str, str, Random], list[str]], ...] = (
    _yaml_value,
    _yaml_value,
    _yaml_value,
    _yaml_nested,
    _yaml_bomb,
    _yaml_flat_bomb,
    lambda name, value, draw: [],
    lambda name, value, draw: [f"{name}:{value}", f"{name}:{value}"],
    lambda name, value, draw: [f"{draw.choice(_NAMES)}:{value}"],
    lambda name, value, draw: [f"{_text(draw)}: {_text(draw)}"],
    lambda name, value, draw: [f"{' ' * draw.randrange(1, 9)}{name}:{value}"],
    lambda name, value, draw: [f"{name}: !!python/object/apply:os.system ['touch {OUTSIDE}']"],
    lambda name, value, draw: [
        f"{name}: !!{draw.choice(('int', 'float', 'binary', 'set', 'omap', 'timestamp'))}{value}"
    ],
    lambda name, value, draw: [f"? {name}", f": {value}"],
    lambda name, value, draw: [f"<<: *{name or 'x'}"],
    lambda name, value, draw: [f"{name}: |", f"  {value}", "   x"],
    lambda name, value, draw: ["---", f"{name}:{value}"],
    lambda name, value, draw: [f"? [{name}, {{a: b}}]", f": {value}"],
)
