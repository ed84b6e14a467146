"""Tensors in files: every type and layout is bit-equal. Slices must cover their tensor exactly, or are refused."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline.checkpoints.capture import Stage, decode_extra_state, encode_extra_state, model_tensors, restore_model
from paceline.checkpoints.format import Manifest, check_headers, check_sizes
from paceline.checkpoints.payload import DTYPES, Box, PayloadReader, Piece, fill_whole, write_pieces
from paceline.errors import CheckpointError, UserError
from paceline.parallel.parts import bits, copy_bits


def raw(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], list[int]]:
    return tensor.dtype, tuple(tensor.shape), bits(tensor).contiguous().view(-1).view(torch.uint8).tolist()


def values_of(dtype: torch.dtype, *shape: int) -> Tensor:
    """Arbitrary bytes as values of a type."""
    count = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    return data.view(dtype).view(shape)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_every_type_of_torch_round_trips(tmp_path: Path, is_async: bool, is_deterministic: bool) -> None:
    """All types, as scalars, empty, complete and in slices. `verify` accepts the header of the file."""
    torch.use_deterministic_algorithms(is_deterministic)
    assert len(DTYPES) > 30
    tensors = {}
    for name, dtype in DTYPES.items():
        for shape in ((), (0, 3), (4, 3), (1, 1, 2)):
            tensors[f"{name}{shape}"] = values_of(dtype, *shape)
    pieces = Stage(is_async=is_async).copy("model", tensors, sharded_only=False)
    seal = write_pieces(tmp_path / "model.safetensors", pieces)
    manifest = Manifest({"model.safetensors": seal}, {})
    check_sizes(tmp_path, manifest)
    check_headers(tmp_path, manifest)
    reader = PayloadReader(tmp_path, ["model.safetensors"])
    assert reader.shapes.keys() == tensors.keys()
    for name, value in tensors.items():
        assert raw(reader.read(name)) == raw(value), name
        if value.dim() == 2 and value.numel():
            box = Box((1, 1), (2, 2))
            assert raw(reader.read(name, box)) == raw(bits(value)[1:3, 1:3].contiguous().view(value.dtype)), name
    assert load_file(tmp_path / "model.safetensors").keys() == tensors.keys()  # other tools can open it


def test_layouts_round_trip(tmp_path: Path) -> None:
    """Transposed, channels-last, expanded and conjugated tensors, and two names for one storage."""
    shared = torch.randn(3)
    tensors = {
        "transposed": torch.randn(3, 4).t(),
        "channels_last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "expanded": torch.randn(3, 1).expand(3, 5),
        "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
        "one": shared,
        "two": shared,
    }
    write_pieces(tmp_path / "x.safetensors", Stage(is_async=False).copy("model", tensors, sharded_only=False))
    reader = PayloadReader(tmp_path, ["x.safetensors"])
    for name, value in tensors.items():
        assert raw(reader.read(name)) == raw(value.resolve_conj()), name
    live = torch.zeros(3, 1).expand(3, 5)
    copy_bits(live, reader.read("expanded"))
    assert raw(live) == raw(tensors["expanded"])


class Keeper(nn.Module):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.weight = nn.Parameter(torch.zeros(1))

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def test_extra_state_round_trips_without_a_pickle(tmp_path: Path) -> None:
    """Plain values keep their types and tensors their bits. Other objects are refused by name."""
    state: dict[Any, Any] = {
        "a": [1, 2.5, True, None],
        (1, "b"): {3, 4},
        "t": torch.tensor([1.0, float("nan")]),
        "x": b"\xff",
        "n": {},
    }
    model = nn.Sequential(Keeper(state), Keeper((-0.0, "text")), Keeper(torch.arange(3)))
    write_pieces(tmp_path / "m.safetensors", Stage(is_async=False).copy("m", model_tensors(model), sharded_only=False))
    other: Any = nn.Sequential(Keeper(0), Keeper(0), Keeper(0))
    restore_model(other, PayloadReader(tmp_path, ["m.safetensors"]))
    found = other[0].state
    assert raw(found.pop("t")) == raw(state.pop("t"))
    assert (found, list(map(type, found["a"]))) == (state, [int, float, bool, type(None)])
    assert repr(other[1].state) == "(-0.0, 'text')"
    assert torch.equal(other[2].state, torch.arange(3))
    with pytest.raises(UserError, match="extra state"):
        model_tensors(nn.Sequential(Keeper(object())))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[" * 100000,
        '{"float": "0"}',
        '{"tensor": ["float32", [9], "AAAA"]}',
        '{"tensor": ["Tensor", [1], ""]}',
        '{"a": 1, "b": 2}',
        '{"dict": [[[], 1]]}',
        '{"bytes": "!"}',
        '{"object": 1}',
    ],
)
def test_forged_extra_state_is_refused(text: str) -> None:
    """Any bytes cause only our own error."""
    with pytest.raises(CheckpointError):
        decode_extra_state(torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8), "m._extra_state")
    assert decode_extra_state(encode_extra_state({"a": 1}, "m"), "m") == {"a": 1}


# --- Slices -----------------------------------------------------------------------------------------------------------


def covers_once(boxes: list[Box], whole: tuple[int, ...]) -> bool:
    """The definition, by counting every element."""
    counts = torch.zeros(whole, dtype=torch.int64)
    for box in boxes:
        counts[box.slices((0,) * len(whole))] += 1
    return bool((counts == 1).all())


def random_boxes(draw: random.Random, whole: tuple[int, ...]) -> list[Box]:
    """A tiling by random cuts, usually with a defect."""
    boxes = [Box((0,) * len(whole), whole)]
    for _ in range(draw.randrange(6)):
        box = boxes.pop(draw.randrange(len(boxes)))
        dimension = draw.randrange(len(whole))
        size = box.shape[dimension]
        at = draw.randint(0, size)
        for start, length in ((0, at), (at, size - at)):
            offset, shape = list(box.offset), list(box.shape)
            offset[dimension] += start
            shape[dimension] = length
            boxes.append(Box(tuple(offset), tuple(shape)))
    kind = draw.randrange(4)
    victim = draw.randrange(len(boxes))
    if kind == 1:
        boxes[victim] = boxes[draw.randrange(len(boxes))]
    elif kind == 2:
        moved = tuple(max(0, start + draw.choice((-1, 0, 1))) for start in boxes[victim].offset)
        boxes[victim] = Box(moved, boxes[victim].shape)
    elif kind == 3:
        del boxes[victim]
    return [box for box in boxes if box.lies_in(whole)]


def test_slices_cover_their_tensor_exactly_or_are_refused() -> None:
    """Compared with counting, for thousands of correct and defective tilings in one to three dimensions."""
    draw, seen = random.Random(16), {True: 0, False: 0}
    for _ in range(6000):
        whole = tuple(draw.randrange(1, 6) for _ in range(draw.randrange(1, 4)))
        boxes = random_boxes(draw, whole)
        expected = covers_once(boxes, whole)
        seen[expected] += 1
        assert fill_whole(boxes, whole) == expected, (boxes, whole)
    assert min(seen.values()) > 1000


def test_thousands_of_slices_are_checked_quickly() -> None:
    """Rows, a grid, and many overlaps: in n log n steps, or refused."""
    rows = [Box((number, 0), (1, 8)) for number in range(20_000)]
    assert fill_whole(rows, (20_000, 8))
    assert not fill_whole([*rows[:-1], rows[0]], (20_000, 8))
    grid = [Box((a, b), (1, 1)) for a, b in itertools.product(range(150), range(150))]
    assert fill_whole(grid, (150, 150))
    assert not fill_whole([Box((0, 0), (1, 1))] * 20_000, (20_000, 1))
    assert not fill_whole([Box((), ()), Box((), ())], ())


def forge(path: Path, tensor: Tensor, place: dict[str, Any] | None) -> str:
    metadata = {"paceline_slices": json.dumps({"w": place} if place else {})}
    save_file({"w": tensor}, path, metadata)
    return path.name


FORGED: dict[str, Callable[[Path], list[str]]] = {
    "two in the same place, one gap": lambda folder: [
        forge(folder / f"{n}.safetensors", torch.ones(2), {"offset": [0], "whole_shape": [4]}) for n in range(2)
    ],
    "overlap and gap in the middle": lambda folder: [
        forge(folder / f"{n}.safetensors", torch.ones(2), {"offset": [at], "whole_shape": [6]})
        for n, at in enumerate((0, 1, 4))
    ],
    "another shape of the whole": lambda folder: [
        forge(folder / "a.safetensors", torch.ones(2, 1), {"offset": [0, 0], "whole_shape": [4, 1]}),
        forge(folder / "b.safetensors", torch.ones(2, 1), {"offset": [2, 0], "whole_shape": [2, 2]}),
    ],
    "another type": lambda folder: [
        forge(folder / "a.safetensors", torch.ones(2), {"offset": [0], "whole_shape": [4]}),
        forge(folder / "b.safetensors", torch.ones(2, dtype=torch.int32), {"offset": [2], "whole_shape": [4]}),
    ],
    "two scalars": lambda folder: [forge(folder / f"{n}.safetensors", torch.ones(()), None) for n in range(2)],
    "a negative whole": lambda folder: [
        forge(folder / "a.safetensors", torch.ones(0, 2), {"offset": [0, 0], "whole_shape": [0, -2]})
    ],
    "an empty whole of great size": lambda folder: [
        forge(folder / "a.safetensors", torch.ones(0, 2), {"offset": [0, 0], "whole_shape": [0, 2**60]})
    ],
}


@pytest.mark.parametrize("case", FORGED)
def test_forged_slices_are_refused(case: str, tmp_path: Path) -> None:
    """No set of files gives a tensor with uninitialized memory."""
    with pytest.raises(CheckpointError):
        PayloadReader(tmp_path, FORGED[case](tmp_path))


@pytest.mark.parametrize("name", ["complex64", "float32", "float8_e5m2", "no_type", "Tensor", 7, None])
def test_a_forged_type_is_refused(name: object, tmp_path: Path) -> None:
    """The size of an element must match the type in the header."""
    metadata = {"paceline_types": json.dumps({"w": name})}
    save_file({"w": torch.ones(3, 3, dtype=torch.uint8)}, tmp_path / "x.safetensors", metadata)
    with pytest.raises(CheckpointError):
        PayloadReader(tmp_path, ["x.safetensors"])


def test_a_box_beyond_the_tensor_is_refused(tmp_path: Path) -> None:
    """Reading outside of a tensor is an error, not a result with uninitialized memory."""
    values = torch.ones(4)
    write_pieces(tmp_path / "x.safetensors", {"w": Piece(values, Box((0,), (4,)), (4,))})
    with pytest.raises(CheckpointError):
        PayloadReader(tmp_path, ["x.safetensors"]).read("w", Box((2,), (4,)))
