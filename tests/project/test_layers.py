"""The layers of docs/architecture.md: a package imports only packages above it, and some never import torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "paceline"
# In the order of docs/architecture.md.
LAYERS = [
    *("errors", "settings", "runs", "runtime", "data", "models", "parallel", "checkpoints", "metrics", "reports"),
    *("training", "launch"),
    *("integrations/slurm", "integrations/kubernetes", "integrations/metaflow", "integrations/runnable"),
    *("tools/bench", "tools/study", "tools/doctor", "tools/course", "tools/trust"),
    *("library", "cli"),
]
GROUPS = ("integrations", "tools")
WITHOUT_TORCH = {
    *("errors", "settings", "runs", "reports", "launch", "integrations/slurm", "integrations/kubernetes"),
    *("tools/study", "cli"),
}
# Layers with heavy and light files: the light ones must not import torch.
LIGHT_FILES = {
    *("runtime/detect.py", "data/registry.py", "models/registry.py", "metrics/sinks.py"),
    *(
        "library/train.py",
        "library/run.py",
        "training/export_request.py",
        "data/pack_format.py",
        "runtime/resources.py",
    ),
    *("runtime/secret.py", "runtime/peers.py", "data/array_folder.py"),
    *("library/call.py", "library/functions.py", "library/modules.py", "library/run_inputs.py"),
}


def imports_of(path: Path, *, top_level_only: bool) -> set[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(str(node.module))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.update(re.findall(r"^paceline\.[a-z_.]+(?=\.)", node.value))  # imported by name, or with `python -m`
    return names


def modules() -> list[tuple[str, Path]]:
    files = [path for path in SOURCE.rglob("*.py") if path.parent != SOURCE or path.name == "errors.py"]
    inside = [path for path in files if path.parent.name not in GROUPS]
    return [(layer_of(path.relative_to(SOURCE).with_suffix("").parts), path) for path in inside]


def layer_of(parts: Sequence[str]) -> str:
    """The layer of a module: its package, below `tools` and `integrations` the package inside."""
    return "/".join(parts[:2]) if parts[0] in GROUPS else parts[0]


def test_layers_import_only_downwards() -> None:
    found = 0
    for layer, path in modules():
        for name in imports_of(path, top_level_only=False):
            parts = name.split(".")
            if parts[0] == "paceline" and len(parts) > 1:
                found += 1
                assert LAYERS.index(layer_of(parts[1:])) <= LAYERS.index(layer), f"{path} imports {name}"
    assert found > 100


def test_light_modules_do_not_import_torch_at_the_top() -> None:
    light = [p for layer, p in modules() if layer in WITHOUT_TORCH or str(p.relative_to(SOURCE)) in LIGHT_FILES]
    assert len(light) > 15
    for path in light:
        heavy = {name.split(".")[0] for name in imports_of(path, top_level_only=True)} & {"torch", "numpy"}
        assert not heavy, f"{path} imports {heavy}"


def test_models_do_not_import_distribution() -> None:
    for layer, path in modules():
        if layer == "models":
            assert not any(name.startswith("torch.distributed") for name in imports_of(path, top_level_only=False))


def test_only_the_world_reads_the_launcher_environment() -> None:
    readers = {layer for layer, path in modules() for node in ast.walk(ast.parse(path.read_text())) if reads_rank(node)}
    assert readers == {"runtime"}


def reads_rank(node: ast.AST) -> bool:
    """`environment["RANK"]`, `environment.get("RANK")` and `"RANK" in environment`."""
    names: list[ast.expr] = []
    if isinstance(node, ast.Subscript):
        names = [node.slice]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop"):
        names = node.args[:1]
    elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
        names = [node.left]
    return any(isinstance(name, ast.Constant) and name.value in ("RANK", "LOCAL_RANK") for name in names)


def test_the_architecture_names_files_that_exist() -> None:
    """Every `folder/file.py` in docs/architecture.md."""
    text = (SOURCE.parents[1] / "docs" / "architecture.md").read_text()
    paths = re.findall(r"`((?:[a-z_]+/)+[a-z_*]+\.py)`", text)
    assert len(paths) > 30
    roots = (SOURCE, SOURCE.parents[1])
    assert [path for path in paths if not any(list(root.glob(path)) for root in roots)] == []


def test_the_three_paths_have_as_many_files_as_the_architecture_says() -> None:
    """At most twenty each. The file of a data set and that of a model stand for one each."""
    text = (SOURCE.parents[1] / "docs" / "architecture.md").read_text()
    walks = re.findall(r"^\*\*(One [a-z ]+)\*\* \((\d+) files\)\.(.*?)\n\n", text, re.MULTILINE | re.DOTALL)
    assert [name for name, _, _ in walks] == ["One sample", "One flag", "One killed rank"]
    for name, said, walk in walks:
        files = set(re.findall(r"`([a-z_/]+(?:\.py|/))`", walk))
        assert len(files) == int(said) <= 20, name


def test_files_and_functions_stay_small() -> None:
    for _, path in modules():
        text = path.read_text()
        assert text.count("\n") <= 400, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno <= 75, f"{path}: {node.name}"
    assert (SOURCE / "training" / "loop.py").read_text().count("\n") <= 150


def test_every_public_name_can_be_imported() -> None:
    import paceline

    assert [name for name in paceline.__all__ if not hasattr(paceline, name)] == []
