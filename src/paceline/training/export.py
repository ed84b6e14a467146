"""A run's best weights as files for other programs: the model, its preprocessing, its labels and a card.

The model is built afresh and filled with the run's weights, so no wrapper leaves a trace in the file. The file is
loaded again and must give the logits of the run's own model; only then does the folder, hidden so far, get its name.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline.data.augment import Pipeline
from paceline.errors import CheckpointError, PacelineError, UserError
from paceline.models.external import first_line
from paceline.runs.folder import RunFolder, write_atomically, write_json
from paceline.settings.resolution import RESIZED
from paceline.settings.tasks import MULTI_LABEL, REGRESSION, SINGLE_LABEL
from paceline.training.model_card import describe_weights, write_card
from paceline.training.reuse import OpenRun, open_run
from paceline.training.weights_hash import hash_model

PROBE_SAMPLES = 8
TOLERANCE = 1e-4  # of the largest logit (or of 1): another runtime adds in another order
Forward = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Loaded:
    """A model that was loaded from its file."""

    forward: Forward | None  # None if it cannot run here
    note: str = ""  # for the verdict


@dataclass(frozen=True)
class Format:
    """How a model becomes a file, comes back from it, and is used by others."""

    file: str
    write: Callable[[nn.Module, nn.Module, Tensor, Path], Loaded]  # of a model, an unfilled one, an example, the file
    code: str  # makes `logits` of `inputs`, for the card


def _through_safetensors(model: nn.Module, blank: nn.Module, example: Tensor, file: Path) -> Loaded:
    # Copies: safetensors refuses weights that two layers share. Extra state has no place in it.
    tensors = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    save_file(tensors, file, metadata={"format": "pt"})
    blank.load_state_dict(load_file(file), strict=False)
    return Loaded(blank)


def _through_torchscript(model: nn.Module, blank: nn.Module, example: Tensor, file: Path) -> Loaded:
    # Tracing works with any model. It may fix the batch size, which our check finds.
    torch.jit.save(torch.jit.trace(model, example, check_trace=False), file)
    return Loaded(torch.jit.load(file, map_location="cpu"))


def _through_torch_export(model: nn.Module, blank: nn.Module, example: Tensor, file: Path) -> Loaded:
    shapes = ({0: torch.export.Dim("batch")},)
    torch.export.save(torch.export.export(model, (example,), dynamic_shapes=shapes), file)
    return Loaded(torch.export.load(file).module())


def _through_onnx(model: nn.Module, blank: nn.Module, example: Tensor, file: Path) -> Loaded:
    """By the exporter that torch recommends. If it is not installed or fails, by the older one, with a note."""
    try:
        importlib.import_module("onnxscript")
        _write_onnx_by_dynamo(model, example, file)
        note = "written by torch.export"
    except ImportError:
        _write_onnx_by_tracing(model, example, file)
        note = "written by torch's older exporter: the newer one needs the package onnxscript"
    except Exception as error:  # an operator or a control flow that it does not know
        _write_onnx_by_tracing(model, example, file)
        note = f"written by torch's older exporter: the newer one fails with {first_line(error)}"
    if importlib.util.find_spec("onnxruntime") is None:
        return Loaded(None, note)
    runtime = importlib.import_module("onnxruntime")
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return Loaded(lambda inputs: torch.from_numpy(session.run(["logits"], {"input": inputs.numpy()})[0]), note)


def _write_onnx_by_dynamo(model: nn.Module, example: Tensor, file: Path) -> None:
    names: dict[str, Any] = {"input_names": ["input"], "output_names": ["logits"]}
    shapes = ({0: torch.export.Dim("batch")},)
    # One file; a model of more than 2 GB does not fit into one, and is written by the other exporter.
    torch.onnx.export(
        model, (example,), file, dynamo=True, dynamic_shapes=shapes, external_data=False, verbose=False, **names
    )
    importlib.import_module("onnx").checker.check_model(str(file), full_check=True)


def _write_onnx_by_tracing(model: nn.Module, example: Tensor, file: Path) -> None:
    names: dict[str, Any] = {"input_names": ["input"], "output_names": ["logits"]}
    batch = {"input": {0: "batch"}, "logits": {0: "batch"}}
    torch.onnx.export(model, (example,), file, dynamo=False, dynamic_axes=batch, **names)
    importlib.import_module("onnx").checker.check_model(str(file), full_check=True)


_FORWARD = "with torch.no_grad():\n    logits = model(torch.from_numpy(inputs))[0]\n"
_LOAD_SAFETENSORS = """\
import torch
from paceline.settings.schema import ModelConfig
from paceline.models.registry import build_model
from safetensors.torch import load_file

# Any other model with these parameter names does as well.
model = build_model(ModelConfig({model}), {shape}, {classes})
model.load_state_dict(load_file("model.safetensors"))
model.eval()
"""
_RUN_ONNX = """\
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
logits = session.run(["logits"], {{"input": inputs}})[0][0]
"""
_LOAD_TORCHSCRIPT = 'import torch\n\nmodel = torch.jit.load("model.ts")\n'
_LOAD_TORCH_EXPORT = 'import torch\n\nmodel = torch.export.load("model.pt2").module()\n'
FORMATS = {
    "safetensors": Format("model.safetensors", _through_safetensors, _LOAD_SAFETENSORS + _FORWARD),
    "torchscript": Format("model.ts", _through_torchscript, _LOAD_TORCHSCRIPT + _FORWARD),
    "onnx": Format("model.onnx", _through_onnx, _RUN_ONNX),
    "torch.export": Format("model.pt2", _through_torch_export, _LOAD_TORCH_EXPORT + _FORWARD),
}

# --- The folder


def export_run(path: Path, format_name: str, output: Path, flags: list[str]) -> list[str]:
    """Write a run's best weights into `output`, replacing what is there; returns lines for the screen."""
    run = open_run(path, ["--device", "cpu", "--compile", "never", *flags])
    output = output.resolve()  # a link stays, its target is replaced
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        verdict = _fill(temporary, path, run, format_name)
        size = (temporary / FORMATS[format_name].file).stat().st_size
        _rename(temporary, output)
    except OSError as error:
        raise UserError("the export cannot be written", where=str(output), got=first_line(error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return [
        f"{path}: weights of {describe_weights(run)}, {run.num_parameters:,} parameters",
        f"{FORMATS[format_name].file}, {size / 1e6:.1f} MB: {verdict}",
        f"everything is in {output}; card.md says how to load it",
    ]


def _fill(folder: Path, path: Path, run: OpenRun, format_name: str) -> str:
    info, file = run.plan.info, folder / FORMATS[format_name].file
    model = _build(run)
    model.load_state_dict(run.model.module.state_dict())
    verdict = _write_model(run, format_name, model, file)
    write_json(folder / "preprocessing.json", describe_preprocessing(run.record.pipeline))
    write_json(folder / "labels.json", {str(number): name for number, name in enumerate(info.classes)})
    write_atomically(folder / "labels.txt", "".join(f"{' '.join(name.split())}\n" for name in info.classes))
    shutil.copymode(folder / "labels.txt", file)  # safetensors writes for its owner alone
    digest = hash_model(model)
    with file.open("rb") as stream:
        file_sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    exported = [
        ("format", f"{format_name}: `{file.name}`, SHA-256 `{file_sha256}`"),
        ("weights", f"of {describe_weights(run)}, float32; SHA-256 of all tensors `{digest}`"),
        ("check", verdict),
    ]
    write_atomically(folder / "card.md", write_card(RunFolder(path), run, make_snippet(format_name, run), exported))
    return verdict


def _build(run: OpenRun) -> nn.Module:
    """The run's model, plain and not yet filled."""
    return run.record.build_model().float().eval()


def _make_probe(run: OpenRun) -> Tensor:
    """Inputs to compare logits with: random samples, always the same, prepared like those of the run."""
    info, generator = run.record.info, torch.Generator().manual_seed(0)
    shape = (PROBE_SAMPLES, *info.sample_shape)
    if info.is_float:
        return torch.randn(shape, generator=generator)
    samples = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return run.record.pipeline.for_evaluation(samples).contiguous()


@torch.no_grad()
def _write_model(run: OpenRun, format_name: str, model: nn.Module, file: Path) -> str:
    """Write the model, load it again and compare; returns the verdict as text."""
    probe = _make_probe(run)
    # In the plain layout of the file: the layout of a convolution's weights decides in which order it adds.
    reference = run.model.module.eval().to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    # One sample alone as well, to find a file that fixed the batch size.
    with run.record.forward_explained(reference):
        expected = [(inputs, reference(inputs)) for inputs in (probe, probe[:1])]
    if not all(bool(logits.isfinite().all()) for _, logits in expected):
        where, hint = str(run.checkpoint.path), "paceline checkpoints RUN lists the others"
        raise CheckpointError("the logits of this model are not finite numbers", where=where, hint=hint)
    try:
        with warnings.catch_warnings():
            # torch.jit and the older ONNX exporter are deprecated, and tracing warns of every `if`.
            warnings.simplefilter("ignore")
            blank = _build(run)
            with run.record.sources.importable():  # exporters import the modules of a model by name
                loaded = FORMATS[format_name].write(model, blank, probe[:2], file)
            forward = loaded.forward
            pairs = [(forward(inputs), logits) for inputs, logits in expected] if forward else []
    except Exception as error:  # each exporter raises its own kinds of errors
        raise UserError(
            f"this model cannot be written as {format_name}",
            where=run.config.model.model_name,
            got=first_line(error),
            hint="another --format: " + ", ".join(name for name in FORMATS if name != format_name),
        ) from error
    only_checked = "checked by onnx.checker only; without onnxruntime its logits could not be compared"
    verdict = _judge(format_name, pairs) if pairs else only_checked
    return f"{verdict}; {loaded.note}" if loaded.note else verdict


def _judge(format_name: str, pairs: list[tuple[Tensor, Tensor]]) -> str:
    difference = max(float((given - wanted).abs().max()) for given, wanted in pairs)
    largest = max(float(wanted.abs().max()) for _, wanted in pairs)
    allowed = TOLERANCE * max(1.0, largest)
    if not difference <= allowed:  # also when it is not a number
        raise PacelineError(
            f"the model written as {format_name} does not give the run's logits; nothing was kept",
            got=f"a difference of {difference:.2g}, logits up to {largest:.2g}",
            allowed=f"up to {allowed:.2g}",
            hint="another --format",
        )
    samples = f"on {len(pairs[0][0])} random samples"
    if difference == 0.0:
        return f"loaded again, it gives the run's logits bit for bit {samples}"
    return f"loaded again, its logits differ from the run's by {difference:.1e} {samples}, allowed {allowed:.1e}"


def _rename(temporary: Path, output: Path) -> None:
    old = temporary.with_suffix(".old")
    if output.exists():
        output.rename(old)
    temporary.rename(output)
    shutil.rmtree(old, ignore_errors=True)


# --- Preprocessing

_PREPARE_FLOATS = "import numpy as np\n\ninputs = np.zeros({}, dtype=np.float32)  # your sample\n"
_PREPARE_BYTES = """\
import json

import numpy as np

with open("preprocessing.json", encoding="utf-8") as file:
    how = json.load(file)
pixels = np.zeros((1, *how["sample_shape"]), dtype=np.float32)  # yours, from 0 to 255
"""
_PREPARE_PICTURE = """\
import json

import numpy as np
from PIL import Image, ImageOps

with open("preprocessing.json", encoding="utf-8") as file:
    how = json.load(file)
picture = ImageOps.exif_transpose(Image.open("picture.png")).convert("RGB")  # yours
_, height, width = how["sample_shape"]
zoom = min(picture.width / width, picture.height / height)
left, top = max(0, picture.width - zoom * width) / 2, max(0, picture.height - zoom * height) / 2
box = (left, top, picture.width - left, picture.height - top)
pixels = np.asarray(picture.resize((width, height), Image.Resampling.BILINEAR, box=box), dtype=np.float32)
pixels = pixels.transpose(2, 0, 1)[None]
if how["channel_order"] == "grey":
    pixels = pixels.mean(1, keepdims=True).round()
"""
_NORMALISE = """\
if how["resize"]:
    from torch import from_numpy, nn
    pixels = nn.functional.interpolate(from_numpy(pixels), **how["resize"]).numpy()
if how["crop"]:
    top, left, height, width = (how["crop"][key] for key in ("top", "left", "height", "width"))
    pixels = pixels[:, :, top : top + height, left : left + width]
mean, std = (np.float32(how[key]).reshape(1, -1, 1, 1) for key in ("mean", "std"))
inputs = (pixels - 255 * mean) / (255 * std)
"""
PREPARE_IMAGE = _PREPARE_PICTURE + _NORMALISE


def describe_preprocessing(pipeline: Pipeline) -> dict[str, Any]:
    """The steps from a sample, for example a uint8 RGB picture, to the model's input in evaluation."""
    shape = list(pipeline.input_shape)
    common = {"pipeline": pipeline.kind, "dtype": "float32", "input_shape": shape}
    if len(shape) != 3:
        return {"kind": "vector", **common, "layout": "NC", "steps": ["a vector is passed on as it is"]}
    if not pipeline.mean:
        return {"kind": "array", **common, "layout": "NCHW", "steps": ["floats are passed on as they are"]}
    channels, height, width = pipeline.raw_shape
    is_cropped = pipeline.kind in RESIZED
    scale = pipeline.resized_side / min(height, width) if is_cropped else 1.0
    size = [round(height * scale), round(width * scale)]
    top, left = ((have - want) // 2 for have, want in zip(size, shape[1:], strict=True))
    resize = {"size": size, "mode": "bilinear", "align_corners": False, "antialias": scale < 1.0}
    steps = [
        f"cut the largest centred part of {height}:{width} out of the upright RGB picture, scale it to {height}x{width}"
        " (Pillow: resize with box, BILINEAR), 8 bits per channel"
        if channels in (1, 3)
        else f"{channels} channels of {height}x{width}, 8 bits per channel",
        "average R, G and B, round to whole numbers (half to even)" if channels == 1 else "",
        f"as float32, resize to {size[0]}x{size[1]} (torch: interpolate)" if scale != 1.0 else "",
        f"cut out the centre, {shape[1]}x{shape[2]}" if is_cropped else "",
        "per channel: (pixel - 255 mean) / (255 std)",
    ]
    return {
        "kind": "image",
        **common,
        "layout": "NCHW",
        "channel_order": {1: "grey", 3: "RGB"}.get(channels, "as in the training data"),
        "pixel_range": [0, 255],
        "sample_shape": [channels, height, width],
        "resize_side": pipeline.resized_side if scale != 1.0 else None,
        "resize": resize if scale != 1.0 else None,
        "crop_size": pipeline.image_size if is_cropped else None,
        "crop": {"top": top, "left": left, "height": shape[1], "width": shape[2]} if is_cropped else None,
        "mean": list(pipeline.mean),
        "std": list(pipeline.std),
        "value_range": [[-m / s, (1 - m) / s] for m, s in zip(pipeline.mean, pipeline.std, strict=True)],
        "steps": [step for step in steps if step],
    }


_PRINT_ANSWER = {
    SINGLE_LABEL: "print(labels[int(logits.argmax())])",
    MULTI_LABEL: "print([label for label, logit in zip(labels, logits) if logit > 0])",
    REGRESSION: "print(dict(zip(labels, logits.tolist())))",
}


def make_snippet(format_name: str, run: OpenRun) -> str:
    """Python that labels `picture.png` (or a vector), to be run in the export folder."""
    plan, model = run.plan, run.config.model
    prepare = PREPARE_IMAGE if plan.info.sample_shape[0] in (1, 3) else _PREPARE_BYTES + _NORMALISE
    if plan.info.is_float:
        prepare = _PREPARE_FLOATS.format((1, *plan.input_shape))
    name = f"{model.model_name!r}, hidden_size={model.hidden_size}, dropout={model.dropout}"
    name += f", model_args={model.model_args!r}" if model.model_args else ""
    load = FORMATS[format_name].code.format(model=name, shape=plan.input_shape, classes=plan.info.num_classes)
    answer = 'with open("labels.txt", encoding="utf-8") as file:\n    labels = file.read().splitlines()\n'
    return f"{prepare}\n{load}\n{answer}{_PRINT_ANSWER[plan.info.task]}\n"
