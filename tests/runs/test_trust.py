"""Code of a run folder is executed only if this user trained the run here, or allows it."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import paceline
from harness.cli import Answer, command
from harness.cli import paceline as run_command
from harness.forged import rewrite_state
from paceline.cli.main import main
from paceline.data.reference import resolve_reference
from paceline.errors import UserError
from paceline.launch.request import read_request
from paceline.runs.trust import (
    RECORD,
    TRUST_VARIABLE,
    is_trusting,
    key_path,
    require_trusted_run,
    sign_code,
    trust_variables,
    trusting_code,
)
from paceline.settings.load import load_config, to_yaml
from paceline.settings.schema import Config
from paceline.settings.syntax import code_references

USER = 2
CODE = "import torch\n\ndef build(num_classes, input_shape):\n    return torch.nn.Sequential(torch.nn.Flatten(), "
CODE += "torch.nn.Linear(input_shape[0] * input_shape[1] * input_shape[2], num_classes))\n"
# Creates a file when it is imported.
HOSTILE = "from pathlib import Path\nPath({!r}).touch()\n" + CODE
FLAGS = ["--num-samples=128", "--epochs=1", "--global-batch-size=64", "--processes=1", "--track"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose functions.py is in the run folder, as with notebooks."""
    home = tmp_path_factory.mktemp("trust")
    (home / "run").mkdir()
    (home / "run" / "functions.py").write_text(CODE)
    reference = f"{home}/run/functions.py:build"
    answer = run_command(
        *("train", "shapes-cnn", *FLAGS, f"--model-name={reference}", "--output-dir=run"), cwd=home, env=state(home)
    )
    assert answer.code == 0, answer.err
    return home


def state(home: Path) -> dict[str, str]:
    """The folder with the user's state, which holds the key."""
    return {"PACELINE_STATE": str(home / "state")}


@pytest.fixture
def mine(trained: Path, tmp_path: Path) -> Path:
    """A copy of that run in another place. config.yaml names its functions.py there."""
    shutil.copytree(trained, tmp_path / "home")
    return relocated(tmp_path / "home")


@pytest.fixture
def foreign(trained: Path, tmp_path: Path) -> Path:
    """The same run as sent by another user, with code that creates a file."""
    shutil.copytree(trained / "run", tmp_path / "other" / "run")
    home = relocated(tmp_path / "other")
    hostile = HOSTILE.format(str(home / "executed"))
    (home / "run" / "functions.py").write_text(hostile)

    def forge(values: dict[str, Any]) -> None:
        (module,) = values["record"]["sources"]["modules"].values()
        module["text"] = hostile

    for checkpoint in (home / "run" / "checkpoints").glob("step-*"):
        rewrite_state(checkpoint, forge)
    return home


def relocated(home: Path) -> Path:
    config = home / "run" / "config.yaml"
    lines = config.read_text().splitlines()
    lines = [f"model_name: '{home}/run/functions.py:build'" if x.startswith("model_name:") else x for x in lines]
    config.write_text("\n".join(lines) + "\n")
    return home


PICTURE = "picture.png"


def commands(home: Path) -> list[list[str]]:
    from PIL import Image

    Image.new("RGB", (32, 32)).save(home / PICTURE)
    return [
        ["evaluate", "run"],
        ["predict", "run", PICTURE],
        ["export", "run", "--format", "safetensors"],
        ["plan", "run/config.yaml"],
        ["train", "run/config.yaml", "--output-dir=again"],
        ["submit", "slurm", "run/config.yaml", "--processes-per-node=1", "--dry-run"],
    ]


def test_code_of_another_users_run_folder_is_not_executed(
    foreign: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command refuses with one screen that names the code. None of it is imported."""
    monkeypatch.chdir(foreign)
    monkeypatch.setenv("PACELINE_STATE", str(foreign / "state"))
    for words in commands(foreign):
        assert main(words) == USER, (words, capsys.readouterr().err)
        screen = capsys.readouterr().err
        is_stored = words[0] in ("evaluate", "predict", "export")  # these use the source in the checkpoint
        assert ("/state.json" if is_stored else f"{foreign}/run/functions.py") in screen
        assert "functions.py" in screen
        assert "--trust-code" in screen
        assert not (foreign / "executed").exists(), words


def test_trust_code_allows_execution(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --trust-code the code is executed."""
    monkeypatch.chdir(foreign)
    monkeypatch.setenv("PACELINE_STATE", str(foreign / "state"))
    for words in commands(foreign)[:3]:
        (foreign / "executed").unlink(missing_ok=True)
        assert main([*words, "--trust-code"]) == 0, words
        assert (foreign / "executed").exists(), words
        assert TRUST_VARIABLE not in os.environ


def test_moved_runs_of_the_same_user_are_trusted(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user who trained a run evaluates it without a question."""
    monkeypatch.chdir(mine)
    monkeypatch.setenv("PACELINE_STATE", str(mine / "state"))
    for words in commands(mine)[:3]:
        assert main(words) == 0, words


def test_changed_code_is_not_trusted(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more byte in functions.py, another function or another field: refused."""
    monkeypatch.setenv("PACELINE_STATE", str(mine / "state"))
    run, code, config = mine / "run", mine / "run" / "functions.py", mine / "run" / "config.yaml"
    require_trusted_run(run)
    code.write_text(CODE + "\n")
    with pytest.raises(UserError) as refused:
        require_trusted_run(run)
    assert str(code) in str(refused.value.where)
    code.write_text(CODE)
    require_trusted_run(run)
    text = config.read_text()
    for old, new in (("functions.py:build", "functions.py:other"), ("loss: ''", "loss: 'os:abort'")):
        changed = text.replace(old, new)
        assert changed != text
        config.write_text(changed)
        with pytest.raises(UserError):
            require_trusted_run(run)


def test_the_library_refuses_untrusted_code(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """run.model(), predict, evaluate and resume refuse. trust_code=True allows it."""
    monkeypatch.setenv("PACELINE_STATE", str(foreign / "state"))
    run = paceline.load_run(foreign / "run")
    commands(foreign)
    for use in (run.model, run.evaluate, lambda: run.predict(foreign / PICTURE), lambda: run.resume(epochs=2)):
        with pytest.raises(UserError) as refused:
            use()
        assert "functions.py" in str(refused.value.where)
        assert "trust_code=True" in str(refused.value.hint)
    assert not (foreign / "executed").exists()
    assert run.model(trust_code=True) is not None
    assert (foreign / "executed").exists()
    assert paceline.load_run(foreign / "run", trust_code=True).evaluate().samples > 0
    assert TRUST_VARIABLE not in os.environ


def test_bytecode_next_to_the_file_is_not_executed(mine: Path) -> None:
    """functions.py is unchanged, but a .pyc file with other code is next to it, with the right time and size."""
    import importlib._bootstrap_external as bootstrap
    import importlib.util

    code = mine / "run" / "functions.py"
    about = code.stat()
    hostile = compile(HOSTILE.format(str(mine / "executed")), str(code), "exec")
    data = bootstrap._code_to_timestamp_pyc(hostile, int(about.st_mtime), about.st_size)  # type: ignore[attr-defined]
    cached = Path(importlib.util.cache_from_source(str(code)))
    cached.parent.mkdir(exist_ok=True)
    cached.write_bytes(data)
    assert resolve_reference(f"{code}:build", where="the test").__name__ == "build"
    assert not (mine / "executed").exists()


# --- The key ----------------------------------------------------------------------------------------------------------


def config_of(folder: Path, reference: str, *flags: str) -> Config:
    folder.mkdir(exist_ok=True)
    config = load_config("shapes-cnn", [f"--model-name={reference}", *flags]).config
    (folder / "config.yaml").write_text(to_yaml(config))
    return config


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return key_path()


def test_only_the_owner_can_read_the_key(tmp_path: Path, key: Path) -> None:
    """Mode 0600 in a folder of mode 0700. A key that others can read, or a link, is not used."""
    (tmp_path / "model.py").write_text(CODE)
    config = config_of(tmp_path / "run", "model.py:build")
    assert sign_code(tmp_path / "run", config) == ""
    assert [stat.S_IMODE(path.stat().st_mode) for path in (key, key.parent)] == [0o600, 0o700]
    assert [path.name for path in key.parent.iterdir()] == [key.name]
    require_trusted_run(tmp_path / "run")
    key.chmod(0o640)
    assert "chmod 600" in sign_code(tmp_path / "run", config)
    with pytest.raises(UserError):
        require_trusted_run(tmp_path / "run")
    key.chmod(0o600)
    key.rename(tmp_path / "elsewhere")
    key.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError):
        require_trusted_run(tmp_path / "run")
    key.unlink()
    key.write_bytes(b"short")
    key.chmod(0o600)
    with pytest.raises(UserError):
        require_trusted_run(tmp_path / "run")


def test_another_users_key_does_not_match(tmp_path: Path, key: Path) -> None:
    """Another user reads the same folder: refused, and reading creates no key."""
    (tmp_path / "model.py").write_text(CODE)
    sign_code(tmp_path / "run", config_of(tmp_path / "run", "model.py:build"))
    key.unlink()
    with pytest.raises(UserError):
        require_trusted_run(tmp_path / "run")
    assert not key.exists()
    sign_code(tmp_path / "other", config_of(tmp_path / "other", "model.py:build"))
    with pytest.raises(UserError):
        require_trusted_run(tmp_path / "run")


def test_a_record_without_hashes_is_refused(tmp_path: Path, key: Path) -> None:
    """A forged or broken code.json is refused."""
    (tmp_path / "model.py").write_text(CODE)
    config = config_of(tmp_path / "run", "model.py:build")
    sign_code(tmp_path / "run", config)
    record = tmp_path / "run" / RECORD
    for text in ("", "[]", "{}", '{"hmac_sha256": "x"}', '{"hmac_sha256": [1, null, "", []]}', "[" * 9999):
        record.write_text(text)
        with pytest.raises(UserError):
            require_trusted_run(tmp_path / "run")


def test_the_users_own_file_may_change_at_its_place(tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of the run folder the user may edit a file. At another place the content must be the same."""
    (tmp_path / "model.py").write_text(CODE)
    sign_code(tmp_path / "run", config_of(tmp_path / "run", "model.py:build"))
    (tmp_path / "model.py").write_text(CODE + "# edited\n")
    require_trusted_run(tmp_path / "run")
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    (tmp_path / "sub" / "model.py").write_text(CODE)
    require_trusted_run(tmp_path / "run")
    (tmp_path / "sub" / "model.py").write_text(HOSTILE.format("x"))
    with pytest.raises(UserError):
        require_trusted_run(tmp_path / "run")


def test_a_module_in_the_working_directory_is_checked(
    tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`package.module:FUNCTION` is refused before any of the package is imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "foreign_package").mkdir()
    (tmp_path / "foreign_package" / "__init__.py").write_text(HOSTILE.format(str(tmp_path / "executed")))
    for name in ("foreign_package:build", "foreign_package.inner:build", "os:abort"):
        config_of(tmp_path / "run", name)
        (tmp_path / "run" / "status.json").write_text("{}")
        with pytest.raises(UserError) as refused:
            read_request(str(tmp_path / "run" / "config.yaml"))
        assert name.partition(":")[0] in str(refused.value.where)
    assert not (tmp_path / "executed").exists()
    assert "foreign_package" not in sys.modules


def test_without_a_home_folder_training_works_with_a_note(tmp_path: Path) -> None:
    """No home folder, or a read-only one: the run trains, and a note says that its code is not signed."""
    (tmp_path / "file").touch()
    (tmp_path / "model.py").write_text(CODE)
    words = ("shapes-cnn", *FLAGS, "--model-name=model.py:build", "--output-dir=run")
    answer = run_command("train", *words, cwd=tmp_path, PACELINE_STATE=str(tmp_path / "file" / "state"))
    assert answer.code == 0, answer.err
    assert "--trust-code" in answer.out
    refused = run_command("evaluate", "run", cwd=tmp_path, PACELINE_STATE=str(tmp_path / "file" / "state"))
    assert refused.code == USER


def test_any_user_opens_runs_without_code(tmp_path: Path, key: Path) -> None:
    """A run without functions needs no key and no record. Models of timm are not code of the run folder."""
    for name in ("cnn", "timm:resnet18", "torchvision:resnet50"):
        config = config_of(tmp_path / "run", name)
        assert code_references(config) == []
        assert sign_code(tmp_path / "run", config) == ""
        require_trusted_run(tmp_path / "run")
    assert not key.exists()
    assert not (tmp_path / "run" / RECORD).exists()


def test_every_reference_of_a_config_is_found() -> None:
    """Data, model, loss and all metrics."""
    flags = ["--dataset=a.py:f", "--model-name=b.c:g", "--loss=d/e:h", "--metrics", "i.py:j", "k.py:l"]
    found = [str(item) for item in code_references(load_config("shapes-cnn", flags).config)]
    assert found == ["a.py:f", "b.c:g", "d/e:h", "i.py:j", "k.py:l"]


def test_trust_ends_with_the_command(key: Path) -> None:
    """Trust does not apply to the next command in the same process, nor to another thread."""
    with trusting_code(True):
        assert is_trusting()
        with trusting_code(False):
            assert is_trusting()
        with ThreadPoolExecutor(1) as other:
            assert not other.submit(is_trusting).result()
        assert trust_variables() == {TRUST_VARIABLE: "1"}
        assert TRUST_VARIABLE not in os.environ
    assert not is_trusting()
    assert trust_variables() == {}


def test_two_processes_make_one_key(tmp_path: Path, key: Path) -> None:
    """Runs that start at the same time use the same key."""
    code = "from paceline.runs.trust import _key; import sys; sys.stdout.write(_key().hex())"

    def ask(_: int) -> Answer:
        return command(sys.executable, "-c", code, cwd=tmp_path, PACELINE_STATE=str(key.parent))

    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(ask, range(3)))
    assert len({answer.out for answer in answers}) == 1
    assert len(answers[0].out) == 64


def test_a_missing_file_is_reported_as_not_found(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run's config as a recipe in another folder: the relative path does not exist. This is not an error of trust."""
    shutil.copytree(trained / "run", tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    lines = config.read_text().splitlines()
    config.write_text("\n".join("model_name: own.py:build" if x.startswith("model_name:") else x for x in lines) + "\n")
    monkeypatch.setenv("PACELINE_STATE", str(trained / "state"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    recipe = "../run/config.yaml"
    for words in (["plan", recipe], ["plan", recipe, "--trust-code"]):
        assert main(words) == USER
        screen = capsys.readouterr().err
        assert str(tmp_path / "elsewhere" / "own.py") in screen
        assert "--trust-code" not in screen
