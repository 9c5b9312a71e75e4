"""records/beside_nanogpt.py: what it makes of nanoGPT's lines and of our run.json."""

import beside_nanogpt

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
