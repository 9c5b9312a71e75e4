"""records/recheck.py: the loss of a checkpoint, and refusals."""

import json
import shutil
from dataclasses import asdict, replace

import pytest
import recheck
from conftest import write_shard
from programs import quick_compilation
from training import BRIEF, facts, trained

import train_gpt as T


@pytest.fixture(scope="module")
def run(tmp_path_factory, shards):
    """A finished run with checkpoints."""
    cfg = replace(BRIEF, checkpoint_every=0, checkpoint_end="always")
    return trained(cfg, tmp_path_factory.mktemp("out"), shards)


def check(run, tmp_path, capsys, *words, **changes) -> tuple[int, str, str]:
    """Return (status, stdout, stderr) of the command for a run.json with `changes`."""
    path = tmp_path / "run.json"
    path.write_text(json.dumps(facts(run) | changes))
    with quick_compilation():
        status = T.report_errors(lambda: recheck.main([str(path), *map(str, words)]))
    return status, *capsys.readouterr()


def test_the_loss_is_the_reported_loss(run, shards, tmp_path, capsys):
    words = run / "checkpoints/4", "--data", shards
    status, loss, _ = check(run, tmp_path, capsys, *words)
    assert status == 0 and float(loss) == pytest.approx(facts(run)["val_loss"], abs=1e-5)


def test_refusals_are_one_line(run, shards, tmp_path, capsys):
    config = facts(run)["config"]
    newer = {name: x for name, x in config.items() if name != "width"}
    words = run / "checkpoints/4", "--data", shards

    def refused(*words, **changes):
        status, out, err = check(run, tmp_path, capsys, *words, **changes)
        assert (status, out, err.count("\n")) == (2, "", 1)
        return err

    other_fields = "its config has other fields than Config in this train_gpt.py"
    for changed in (newer, config | {"new": 1}):
        assert other_fields in refused(*words, config=changed)
    assert "was saved by another train_gpt.py" in refused(*words, config=config | {"mlp_width": 64})
    assert "there is no " in refused(run / "checkpoints/9", *words[1:])
    data = shutil.copytree(shards, tmp_path / "data")
    write_shard(data / "small_val_000000.bin", T.open_shard(data / "small_train_000001.bin"))
    assert "is not the shard of the record" in refused(words[0], "--data", data)
    assert asdict(BRIEF).keys() == config.keys()
