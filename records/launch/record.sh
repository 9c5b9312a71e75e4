#!/bin/bash
# A record, from an empty machine to a directory that `leaderboard.py check` accepts. In a clone:
#   BY="Your Name" bash records/launch/record.sh TRACK
# TRACK is v6e-8, v6e-1, v5e-8, 8xh100, 1xgpu or cpu (the preset `tiny` on any machine, in minutes).
# The script installs packages into ~/env (created if needed), checks devices and memory, downloads
# the tokens, trains each seed, adds the record, checks all records, and writes results.tar.gz.
#
# If the script is interrupted, start it again with the same variables. Finished seeds are skipped.
# An interrupted seed is resumed if it has a checkpoint, and otherwise starts again. A run that is
# stopped by a signal saves a checkpoint; SETTINGS=checkpoint_every=N also saves one every N steps.
# The script deletes no runs.
#
# Optional variables:
#   BY        your name, or a list of names
#   RATE      price of the machine in dollars per hour, e.g. 2.49 (for tracks of GPUs)
#   SETTINGS  settings for --set, e.g. ngram_rows=22675456
#   RECORD    name of the record (default: First); each choice of SETTINGS needs another name
#   WHAT      one sentence about the change
#   RUNS      number of seeds: 4 (default), 8 or 16
#   PRESET    default: speedrun (tiny on the track cpu)
#   PYTHON    a Python that already has the packages; nothing is installed
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"  # started as `sh record.sh`
set -euo pipefail
cd "$(dirname "$0")/../.."

say() { echo "== $(date +%T) $*"; }
fail() {
  echo "error: $*" >&2
  exit 2
}

TRACK=${1:-}
machine="*"  # a pattern for the devices that JAX finds
case $TRACK in
  v6e-8) kind=tpu machine="8 x TPU v6 lite" ;;
  v6e-1) kind=tpu machine="1 x TPU v6 lite" ;;
  v5e-8) kind=tpu machine="8 x TPU v5 lite" ;;
  8xh100) kind=gpu machine="8 x *H100*" ;;
  1xgpu) kind=gpu machine="1 x NVIDIA*" ;;
  cpu) kind=cpu && export JAX_PLATFORMS=cpu ;;
  *) fail "unknown track '$TRACK': use v6e-8, v6e-1, v5e-8, 8xh100, 1xgpu or cpu" ;;
esac
RUNS=${RUNS:-4} RECORD=${RECORD:-First}
read -ra settings <<<"checkpoint_end=never ${SETTINGS:-}"
if [ $kind = cpu ]; then
  PRESET=${PRESET:-tiny}
  settings=(target=3.95 "${settings[@]}")  # the target of the track
fi
PRESET=${PRESET:-speedrun}
recipe="$PRESET ${settings[*]}"
OUT=logs/$TRACK-$RECORD  # git ignores it
if [ -e "$OUT/settings" ]; then
  trained=$(cat "$OUT/settings")
  [ "$trained" = "$recipe" ] || fail "the runs in $OUT have other settings ($trained): change RECORD"
fi

# make_environment: creates ~/env. uv downloads a Python if the machine only has versions that are
# too old for JAX.
make_environment() {
  if ! command -v uv >/dev/null; then
    python3 -m venv ~/uv || fail "python3 has no venv: install python3-venv, or uv"
    ~/uv/bin/pip install --quiet --disable-pip-version-check uv
    PATH=$PATH:$HOME/uv/bin
  fi
  uv venv --quiet --seed --python ">=3.11,<3.15" ~/env
}

if [ -z "${PYTHON:-}" ]; then
  say "installing packages, about three minutes"
  packages=()
  if [ $kind = tpu ]; then packages=("jax[tpu]"); fi
  if [ $kind = gpu ]; then
    nvidia-smi || fail "nvidia-smi finds no GPU"
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)
    capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1)
    # CUDA 13 needs driver 580 or newer. CUDA 13 and cuDNN 9.11 do not support GPUs before Turing.
    packages=("jax[cuda13]")
    if [ "${driver%%.*}" -lt 580 ]; then packages=("jax[cuda12]"); fi
    if [ "${capability/./}" -lt 75 ]; then packages=("jax[cuda12]" "nvidia-cudnn-cu12<9.11"); fi
  fi
  [ -x ~/env/bin/python ] || make_environment
  PYTHON=~/env/bin/python
  # ${packages[@]+...}: bash 3.2 of macOS refuses to expand an empty array
  $PYTHON -m pip install --quiet -r requirements.txt ${packages[@]+"${packages[@]}"} huggingface_hub
fi

say "checking devices and memory"
show='import jax; print(jax.device_count(), "x", jax.devices()[0].device_kind)'
devices=$($PYTHON -c "$show" | tail -n 1)
# shellcheck disable=SC2053  # a pattern
[[ $devices == $machine ]] || fail "the track $TRACK needs $machine; JAX finds $devices"
# If the run does not fit, the last line names the SETTINGS that do.
$PYTHON train_gpt.py "$PRESET" --set "${settings[@]}" --show | tail -n 1

if [ "$PRESET" != tiny ]; then
  say "downloading tokens, 2 GB"
  $PYTHON data/cached_fineweb10B.py 9
fi

mkdir -p "$OUT"
echo "$recipe" >"$OUT/settings"
for ((seed = 0; seed < RUNS; seed++)); do
  if grep -qs '"finished": true' "$OUT"/*-s"$seed"-*/run.json; then continue; fi
  say "training seed $seed, of 0 to $((RUNS - 1)); the first run compiles for some minutes"
  checkpoint=$(ls -d "$OUT"/*-s"$seed"-*/checkpoints/[0-9]* 2>/dev/null | tail -n 1) || true
  if [ "$checkpoint" ]; then
    $PYTHON train_gpt.py --resume "${checkpoint%/checkpoints/*}"
  else
    $PYTHON train_gpt.py "$PRESET" --out "$OUT" --seed "$seed" --set "${settings[@]}"
  fi
  tar czf results.tar.gz --exclude=checkpoints "$OUT"
done

if ls records/"$TRACK"/*_"$RECORD"/record.json >/dev/null 2>&1; then
  say "the record $RECORD is already there"
else
  say "adding the record"
  finished=($(grep -l '"finished": true' "$OUT"/*/run.json))
  $PYTHON records/leaderboard.py add "${finished[@]%/run.json}" \
    --track "$TRACK" --name "$RECORD" --by "${BY:-me}" --pin \
    ${RATE:+--rate "$RATE"} --what "${WHAT:-The preset $PRESET with ${settings[*]}.}" ||
    fail "no record was added; results.tar.gz has the runs"
fi
$PYTHON records/leaderboard.py render
$PYTHON records/leaderboard.py check
tar czf results.tar.gz --exclude=checkpoints "$OUT" records/"$TRACK" records/README.md \
  records/tokens.json
say "done: fetch results.tar.gz, then delete the machine"
