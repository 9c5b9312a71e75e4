"""How the tools in records/ start: with other modules on the path, and without jax."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

TOOLS = sorted(
    path for path in (ROOT / "records").glob("*.py") if '__name__ == "__main__"' in path.read_text()
)
LOAD = """
import runpy, sys
path, modules = [*sys.path], {*sys.modules}
for tool in sys.argv[1:]:
    runpy.run_path(tool, run_name="tool")
    sys.path[:] = path
    for name, module in [*sys.modules.items()]:
        if "/records/" in (getattr(module, "__file__", "") or ""):
            del sys.modules[name]
"""


def test_tools_find_their_modules_whatever_else_is_on_the_path(tmp_path):
    """As with PYTHONSAFEPATH, where a script's folder is not on the path."""
    for name in ("data", "records"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    for name in ("checks", "shards", "train_gpt"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('the wrong module')")
    env = os.environ | {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", LOAD, *TOOLS]
    done = subprocess.run(command, env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("tool", TOOLS, ids=lambda path: path.stem)
def test_a_python_without_jax_is_reported_in_one_line(tool):
    """-S: without the packages of site-packages, as the system's Python may be."""
    command = [sys.executable, "-S", tool, "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
    assert "No module named" in done.stderr and "pip install -r requirements.txt" in done.stderr
