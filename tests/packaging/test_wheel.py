"""The distribution: a wheel is built, installed without torch in an environment of its own, and works there."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return next(out.glob("pulse_rl-*.whl"))


def test_the_wheel_holds_the_package_and_its_licence_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"pulse", next(top for top in tops if top.endswith(".dist-info"))}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "pulse/py.typed" in names


def test_the_wheel_asks_for_torch_only_as_an_extra(wheel):
    archive = zipfile.ZipFile(wheel)
    metadata = archive.read(next(name for name in archive.namelist() if name.endswith("METADATA"))).decode()
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist: torch")]
    assert required
    assert all("extra ==" in line for line in required)


def test_the_installed_wheel_diffs_and_applies_without_torch(wheel, tmp_path):
    """Its dependencies come from this environment by a path file; torch is hidden, as on a machine that has none."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", wheel]
    subprocess.run(install, check=True, timeout=120)
    site = next((tmp_path / "env" / "lib").glob("python*/site-packages"))
    here = Path(sys.executable).parents[1] / "lib" / site.parent.name / "site-packages"
    (site / "borrowed.pth").write_text(f"{here}\n")
    (site / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    code = (
        "import pulse, numpy as np; a = {'w': np.zeros(9, np.float32)}; b = {'w': np.ones(9, np.float32)};"
        "p = pulse.decode(pulse.encode(pulse.diff(a, b), a), a); assert (pulse.apply(p, a)['w'] == 1).all();"
        "print(pulse.__file__)"
    )
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert str(tmp_path) in done.stdout
    assert (
        "Two checkpoints"
        in subprocess.run([tmp_path / "env" / "bin" / "pulse", "--help"], check=True, capture_output=True, text=True, timeout=60).stdout
    )
