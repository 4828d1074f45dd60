"""The public face: what is exported, what importing costs, and that the layers hold."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import pulse

ROOT = Path(__file__).parents[2]


def loaded_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_every_public_name_is_there_and_sorted():
    assert pulse.__all__ == sorted(pulse.__all__)
    assert set(dir(pulse)) == {*pulse.__all__, "__version__"}
    assert all(getattr(pulse, name) is not None for name in pulse.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        pulse.nothing  # noqa: B018


def test_importing_pulse_loads_nothing_heavy():
    assert not {"numpy", "torch", "numba", "obstore", "zstandard", "typer"} & loaded_by("import pulse")


@pytest.mark.parametrize("name", ["Publisher", "Subscriber", "diff", "encode", "open_store", "MemoryWeights"])
def test_the_wire_world_never_loads_torch(name):
    assert "torch" not in loaded_by(f"from pulse import {name}")


def test_the_version_is_the_one_in_the_project_file_and_the_changelog_has_it_or_unreleased():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == pulse.__version__
    assert "## Unreleased" in (ROOT / "CHANGELOG.md").read_text()


def test_the_readme_maps_every_module_in_one_line_each():
    text = (ROOT / "README.md").read_text()
    modules = [path.relative_to(ROOT / "src" / "pulse").as_posix() for path in (ROOT / "src" / "pulse").rglob("*.py")]
    missing = [name for name in modules if not name.endswith("__init__.py") and f"  {name} " not in text]
    assert missing == []
