#!/bin/bash
# A record on one GPU, from a bare machine to a folder that `leaderboard.py check` accepts. In a clone:
#   BY="Your Name" RATE=2.49 SETTINGS=ngram_rows=22675456 bash records/launch/1xgpu.sh
# RATE: dollars an hour of the machine. SETTINGS: of --set, such as those that a refusal names. RUNS:
# runs, 4 by default (8 or 16 for closer calls). Nothing is deleted: start it again after an
# interruption, and it resumes an interrupted run that has a checkpoint, or starts that seed again.
# A run that is stopped writes one; checkpoint_every=N in SETTINGS writes one every N steps, too. For
# other SETTINGS take another NAME.
# PYTHON: one that has the packages, in place of ~/env, which is made. To try all of it on a CPU:
#   PRESET=tiny TRACK=cpu SETTINGS=target=3.95 PYTHON=python3 bash records/launch/1xgpu.sh
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"  # `sh` may be another shell
set -euo pipefail
cd "$(dirname "$0")/../.."
PRESET=${PRESET:-speedrun} TRACK=${TRACK:-1xgpu} RUNS=${RUNS:-4} NAME=${NAME:-First}
OUT=logs/$NAME  # git ignores it
read -ra settings <<<"checkpoint_end=never ${SETTINGS:-}"
mkdir -p "$OUT"
[ -e "$OUT/settings" ] || echo "$PRESET ${settings[*]}" >"$OUT/settings"
if [ "$(cat "$OUT/settings")" != "$PRESET ${settings[*]}" ]; then
  echo "runs in $OUT are of $(cat "$OUT/settings"): take another NAME" >&2
  exit 2
fi
say() { echo "== $(date +%T) $*"; }

if [ -z "${PYTHON:-}" ]; then
  say "packages, some three minutes"
  # CUDA 13 needs a driver of 580 or newer, and a GPU since Turing, which cuDNN 9.11 needs as well.
  # The image's own Python may be older than jax's 3.11.
  driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1)
  packages=("jax[cuda13]")
  if [ "${driver%%.*}" -lt 580 ]; then packages=("jax[cuda12]"); fi
  if [ "${capability/./}" -lt 75 ]; then packages=("jax[cuda12]" "nvidia-cudnn-cu12<9.11"); fi
  if [ ! -x ~/env/bin/python ]; then
    python3 -m venv ~/uv && ~/uv/bin/pip install --quiet uv  # pip may not touch the image's Python
    ~/uv/bin/uv venv --quiet --seed --python 3.12 ~/env
  fi
  PYTHON=~/env/bin/python
  $PYTHON -m pip install --quiet -r requirements.txt "${packages[@]}" huggingface_hub
  nvidia-smi
fi

say "does it fit?"  # if not, the last line names the SETTINGS that do
$PYTHON train_gpt.py "$PRESET" --set "${settings[@]}" --show | tail -n 1

if [ "$PRESET" != tiny ]; then
  say "tokens, 2 GB"
  $PYTHON data/cached_fineweb10B.py 9
fi

for ((seed = 0; seed < RUNS; seed++)); do
  if grep -qs '"finished": true' "$OUT"/*-s"$seed"-*/run.json; then continue; fi
  say "seed $seed of $RUNS; the first one compiles for some minutes"
  checkpoint=$(ls -d "$OUT"/*-s"$seed"-*/checkpoints/[0-9]* 2>/dev/null | tail -n 1) || true
  if [ "$checkpoint" ]; then
    $PYTHON train_gpt.py --resume "${checkpoint%/checkpoints/*}"
  else
    $PYTHON train_gpt.py "$PRESET" --out "$OUT" --seed "$seed" --set "${settings[@]}"
  fi
  tar czf results.tar.gz --exclude=checkpoints "$OUT"  # all that a record needs
done

say "the record"
finished=($(grep -l '"finished": true' "$OUT"/*/run.json))
$PYTHON records/leaderboard.py add "${finished[@]%/run.json}" \
  --track "$TRACK" --name "$NAME" --by "${BY:-me}" --pin \
  ${RATE:+--rate "$RATE"} --what "${WHAT:-The preset $PRESET with ${settings[*]}.}"
$PYTHON records/leaderboard.py render
$PYTHON records/leaderboard.py check
tar czf results.tar.gz --exclude=checkpoints "$OUT" records/"$TRACK" records/README.md records/tokens.json
say "done: fetch results.tar.gz, then delete the machine"
