"""records/beside_nanogpt.py: what it makes of nanoGPT's lines and of our run.json."""

import beside_nanogpt

from train_gpt import report_errors

# In place of the Python that has torch: iteration 2 evaluates.
PYTHON = """#!/bin/sh
case "$1" in
  prepare.py) grep -q word input.txt ;;
  -c) echo "number of parameters: 0.80M"; echo 1.5 ;;
  *) for ms in 10.00 10.00 900.00 10.00; do echo "iter 1: loss 2.0, time ${ms}ms, mfu 0%"; done ;;
esac
"""


def test_seconds_of_nanogpt_leave_out_its_evaluations(tmp_path):
    (tmp_path / "data/shakespeare_char").mkdir(parents=True)
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    loss, trained, seconds = beside_nanogpt.train_nanogpt(tmp_path, "words", str(python))
    assert (loss, trained) == (1.5, 0.04) and 0 < seconds < 30


def test_what_cannot_be_compared_is_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "data/shakespeare_char").mkdir(parents=True)
    for name, content in (("short.txt", b"words"), ("other.txt", "Grüße".encode())):
        (tmp_path / name).write_bytes(content)
    for clone, text, says in [
        (tmp_path / "none", "short.txt", "none/data/shakespeare_char: name a clone of github"),
        (tmp_path, "short.txt", "less than 540,000 characters"),
        (tmp_path, "other.txt", "other.txt: not ASCII"),
        (tmp_path, "missing.txt", "No such file"),
    ]:
        argv = [str(clone), str(tmp_path / text)]
        assert report_errors(lambda argv=argv: beside_nanogpt.main(argv)) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and says in error and error.count("\n") == 1
