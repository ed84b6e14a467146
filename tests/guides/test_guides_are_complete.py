"""Every page with an install line has a test in this folder."""

from __future__ import annotations

from pathlib import Path

from harness.guides import pages_that_install

# Pages with an install line, and the test that runs it.
TYPED = {
    "README.md": "test_readme_trains",
    "docs/index.md": "test_start_page_installs_and_trains",
    "docs/tutorials/install.md": "test_install",
    "docs/guides/own-model.md": "test_own_model_installs_torchvision",
    "docs/guides/object-stores.md": "test_object_stores_install",
    "docs/guides/metaflow.md": "test_metaflow_trains",
    "docs/guides/runnable.md": "test_runnable_trains",
    "docs/guides/kubernetes.md": "test_kubernetes_writes",
}
NOT_TYPED = {
    "CONTRIBUTING.md": "its first line is typed for the guides of the clone; the rest of its commands are CI itself",
    "docs/guides/data.md": "extras that make setup, test-extras and test-flows install",
    "docs/guides/slurm-cluster.md": "installs on real machines; its cluster on one machine is typed",
}


def test_every_page_with_an_install_line_is_tested_or_has_a_reason() -> None:
    """A new guide with an install line needs a test, or a reason."""
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))

    assert set(pages_that_install()) == {*TYPED, *NOT_TYPED}
    assert [name for name in TYPED.values() if f"def {name}" not in tests] == []
