"""Everything is in pyproject.toml, but for one thing: a wheel carries the course's lessons inside the package."""

from pathlib import Path
from shutil import copytree, ignore_patterns

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithLessons(build_py):
    def run(self) -> None:
        super().run()
        lessons = Path(__file__).parent / "course"
        if lessons.is_dir() and not self.editable_mode:
            target = Path(self.build_lib) / "paceline" / "tools" / "course" / "lessons"
            left_out = ignore_patterns(".*", "__pycache__", "wrong", "ruff.toml")
            copytree(lessons, target, ignore=left_out, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithLessons})
