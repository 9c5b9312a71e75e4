"""How scripts start: next to other modules, without packages, and with uv."""

import ast
import os
import re
import subprocess
import sys
import tomllib

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


def test_a_missing_package_of_the_tools_is_reported_with_its_file():
    code = "import runpy, sys; sys.modules['scipy'] = None; runpy.run_path(sys.argv[1])"
    command = [sys.executable, "-c", code, ROOT / "records/leaderboard.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
    assert "scipy" in done.stderr and "-r records/requirements.txt" in done.stderr


def requirements(path: str) -> list[str]:
    """Return the requirements in a file, without comments."""
    lines = (ROOT / path).read_text().splitlines()
    return [x for x in (line.partition("#")[0].strip() for line in lines) if x]


def packages_of(path: str) -> set[str]:
    """Return the names of the packages in a requirements file."""
    return {re.match(r"[\w-]+", line)[0] for line in requirements(path)}


def imports_of(*scripts) -> set[str]:
    """Return the names of imported packages that are neither in Python nor in this repository."""
    found = set()
    for script in scripts:
        for node in ast.walk(ast.parse(script.read_text())):
            if isinstance(node, ast.Import):
                found |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(node.module.partition(".")[0])
    own = {path.stem for path in [ROOT / "train_gpt.py", *ROOT.glob("*/*.py")]}
    return found - own - {*sys.stdlib_module_names}


def test_imported_packages_are_declared():
    trainer = packages_of("requirements.txt")
    assert imports_of(ROOT / "train_gpt.py") == trainer - {"pytest"}
    tools = imports_of(*ROOT.glob("data/*.py"), *ROOT.glob("records/*.py"))
    assert tools - trainer == {"huggingface_hub", "scipy"}
    assert tools <= trainer | packages_of("records/requirements.txt")


def test_inline_metadata_equals_the_requirements():
    """`uv run train_gpt.py` reads it."""
    source = (ROOT / "train_gpt.py").read_text()
    (block,) = re.findall(r"^# /// script\n((?:#.*\n)+?)# ///$", source, re.M)
    metadata = tomllib.loads(re.sub("^# ?", "", block, flags=re.M))
    to_train = [line for line in requirements("requirements.txt") if line != "pytest"]
    assert metadata["dependencies"] == to_train
    oldest = tomllib.loads((ROOT / "ruff.toml").read_text())["target-version"]
    assert metadata["requires-python"] == f">=3.{oldest.removeprefix('py3')}"


def test_the_version_is_the_newest_date_in_the_changelog():
    dates = re.findall(r"^## (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert dates == sorted(dates, reverse=True)
    command = [sys.executable, ROOT / "train_gpt.py", "--version"]
    done = subprocess.run(command, capture_output=True, text=True)
    version = dates[0].replace("-", ".")
    assert re.fullmatch(rf"train_gpt.py {version}, source [0-9a-f]{{12}}, jax \S+\n", done.stdout)
