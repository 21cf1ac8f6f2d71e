"""A test that skips although this machine could run it fails CI; one that needs what is not here does not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"


def run(folder: Path, body: str, strict: bool) -> subprocess.CompletedProcess[str]:
    shutil.copy(CONFTEST, folder / "conftest.py")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: x\n    hardware: x\n")
    (folder / "test_it.py").write_text("import pytest\n\ndef test_runs():\n    pass\n\n" + body)
    env = {key: value for key, value in os.environ.items() if key not in ("M2FLOW_STRICT_SKIPS", "M2FLOW_HARDWARE")}
    env |= {"M2FLOW_STRICT_SKIPS": "1"} if strict else {}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(folder)],
        cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


SILENT = {
    "in a test": "def test_b():\n    pytest.skip('not today')\n",
    "by a mark": "@pytest.mark.skip(reason='not today')\ndef test_b():\n    pass\n",
    "of a missing package": "def test_b():\n    pytest.importorskip('no_such_package', reason='not today')\n",
    "of a whole file": "pytest.skip('not today', allow_module_level=True)\n",
}


@pytest.mark.parametrize("body", SILENT.values(), ids=SILENT.keys())
def test_a_silent_skip_fails_the_strict_run_and_is_named(tmp_path: Path, body: str) -> None:
    strict = run(tmp_path, body, strict=True)
    assert strict.returncode != 0
    assert "skipped, though this machine could run them" in strict.stdout
    assert "not today" in strict.stdout.rpartition("could run them")[2]
    loose = run(tmp_path, body, strict=False)
    assert loose.returncode in (0, 5)  # 5: the whole file was skipped, so nothing ran


def test_a_test_for_absent_hardware_may_skip(tmp_path: Path) -> None:
    result = run(tmp_path, "@pytest.mark.hardware\ndef test_b():\n    assert False\n", strict=True)
    assert result.returncode == 0, result.stdout
    assert "1 passed, 1 skipped" in result.stdout


def test_the_marks_excuse_nothing_where_the_machine_has_the_part(tmp_path: Path) -> None:
    here = "import os\nos.environ['M2FLOW_HARDWARE'] = '1'\n\n"
    body = here + "@pytest.mark.hardware\ndef test_b():\n    pytest.skip('not today')\n"
    assert run(tmp_path, body, strict=True).returncode != 0
