"""How the tools in records/ and the download start: with other modules, and without JAX."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

TOOLS = [path for path in (ROOT / "records").glob("*.py") if "__main__" in path.read_text()]
TOOLS.append(ROOT / "data/cached_fineweb10B.py")
LOAD = """
import runpy, sys
root, *tools = sys.argv[1:]
path = [*sys.path]
for tool in tools:
    runpy.run_path(tool, run_name="tool")
    sys.path[:] = path
    for name, module in [*sys.modules.items()]:
        if (getattr(module, "__file__", "") or "").startswith(root):
            del sys.modules[name]
"""


def test_tools_find_their_modules_before_others_on_the_path(tmp_path):
    """Also with PYTHONSAFEPATH, without the folder of the script on the path."""
    for name in ("data", "records"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    for name in ("checks", "shards", "train_gpt"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('the wrong module')")
    env = os.environ | {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", LOAD, ROOT, *TOOLS]
    done = subprocess.run(command, env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("tool", TOOLS, ids=lambda path: path.stem)
def test_a_python_without_jax_is_reported_in_one_line(tool):
    """With -S, Python has no site-packages."""
    command = [sys.executable, "-S", tool, "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
    assert "No module named" in done.stderr and "pip install -r requirements.txt" in done.stderr
