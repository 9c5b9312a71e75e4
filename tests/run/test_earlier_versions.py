"""Runs of earlier versions can still be read.

tests/golden/run_351390b.tar.xz has a run of commit 351390b: `tiny` with width 16, in 8 steps.
"""

import json
import sys
import tarfile

import pytest
from conftest import ROOT
from programs import mesh_of, quick_compilation

import train_gpt as T

sys.path.insert(0, str(ROOT / "records"))
import checks
import sample


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> T.Path:
    """The folder of the run."""
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(ROOT / "tests/golden/run_351390b.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    (run,) = folder.iterdir()
    return run


def test_a_new_run_starts_with_its_parameters(run, monkeypatch):
    """Only the folder of the data changes in its config."""
    found = []
    monkeypatch.setattr(T, "train", lambda cfg, *_: found.append(cfg))
    assert T.main(["--start", str(run), "--set", "steps=4"]) == 0
    (cfg,) = found
    assert (cfg.width, cfg.ngram_rows, cfg.steps) == (16, 256, 4)
    saved = T.find_checkpoint(T.Path(cfg.start), pytest.fail)
    mesh = mesh_of(1)
    params = T.load_state(mesh, saved, ("params",))["params"]
    assert {name: x.shape for name, x in params.items()} == T.shapes_of(cfg)


def test_it_is_not_resumed(run, capsys):
    assert T.main(["--resume", str(run)]) == 2
    line = capsys.readouterr().err
    assert f"train_gpt.py has changed since {run} was started: restore it (" in line


def test_its_model_continues_a_text(run, capsys):
    with quick_compilation():
        words = ["--prompt", "The ", "--tokens", "5", "--temperature", "0"]
        assert sample.main([str(run), *words]) is None
    assert capsys.readouterr().out.startswith("The ")


def test_its_log_is_valid(run):
    facts = json.loads((run / "run.json").read_text())
    read = checks.read_run(run)
    assert read.loss == facts["val_loss"] == pytest.approx(5.2536, abs=1e-4)
