#!/usr/bin/env bash
# What can be seen on a machine with GPUs. Each part takes under ten minutes:
#
#   benchmarks/gpu.sh                  doctor, same bits, the cost of a step, models that fill a GPU
#   benchmarks/gpu.sh bits             the same bits by kernel, precision, run, process and towers
#   benchmarks/gpu.sh devices          visible GPUs, memory fractions, a plan against the memory
#   benchmarks/gpu.sh text             a language model: trained, profiled, sampled, kept fed
#   benchmarks/gpu.sh --small PART     the same programs on simulated CPU devices, in some minutes
#   PYTHON=... benchmarks/gpu.sh       another Python than .venv's
#
# For GPUs install JAX's own build first: .venv/bin/pip install 'jax[cuda13]' (or cuda12).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-.venv/bin/python}
small=
if [[ ${1:-} == --small ]]; then
  small=--small
  shift
fi
here=(--devices 1,1)
[[ $small ]] && here=(--simulate 1,1)

heading() { printf '\n== %s (%d s)\n' "$*" "$SECONDS"; }

# verify RECIPE OPTION...: the same bits on one device, twice, and on all of them.
verify() {
  heading "the same bits on one device, twice: $*"
  "$python" -m multitower verify "$@" "${here[@]}"
  [[ $small ]] && return
  if ((count > 1)); then
    heading "the same bits on 1 and on $count devices: $*"
    "$python" -m multitower verify "$@" --devices "1,$count"
  fi
}

steps() {
  local same=(digits --towers 8 --steps 3) overhead=(--rounds 7) models=(--rounds 5 --steps 10)
  if [[ $small ]]; then
    same=(examples/own_recipe/recipe.py --towers 2 --steps 1)  # is compiled in a moment
    overhead=(--rounds 2 --only Polynomial)
    models=(--small --rounds 2 --steps 2)
  else
    overhead+=(--devices "$count" --real)
  fi
  heading "doctor"
  "$python" -m multitower doctor
  verify "${same[@]}"
  heading "the cost of a step"
  "$python" benchmarks/step_overhead.py "${overhead[@]}"
  heading "models that fill a GPU"
  "$python" benchmarks/gpu_steps.py "${models[@]}"
}

bits() {
  heading "the same bits by kernel"
  if [[ $small ]]; then
    "$python" benchmarks/gpu_bits.py --small --only product,sort --towers 1,2
    return
  fi
  "$python" benchmarks/gpu_bits.py
  for towers in 1 2 4 8; do
    verify cifar10-resnet20 --synthetic --towers "$towers" --steps 3
  done
  verify gpt --towers 8 --steps 3
  verify gpt --towers 8 --steps 3 --compute-dtype bfloat16
}

devices() {
  heading "device control, and plans"
  "$python" benchmarks/gpu_devices.py $small
}

text() {
  local runs size=small many=(--steps 300 --batch-size 64 --profile 100:103)
  local pipeline=(--rounds 5 --real)
  if [[ $small ]]; then
    size=micro
    many=(--steps 4 --batch-size 8 --simulate 2)
    pipeline=(--rounds 1)
  fi
  runs=$(mktemp -d)
  for dtype in float32 bfloat16; do
    heading "a language model, $dtype"
    "$python" -m multitower train gpt --size $size --towers 8 "${many[@]}" \
      --compute-dtype $dtype --run-dir "$runs/$dtype"
  done
  "$python" -m multitower sample "$runs/bfloat16" --prompt 'def ' --bytes 200
  heading "the input pipeline"
  "$python" benchmarks/input_pipeline.py "${pipeline[@]}"
}

[[ $small ]] || count=$("$python" -c 'import multitower as mt; print(len(mt.devices("gpu")))')
for part in "${@:-steps}"; do
  case $part in
    steps | bits | devices | text) "$part" ;;
    *) echo "gpu.sh: there is no part $part: steps, bits, devices, text." >&2 && exit 2 ;;
  esac
done
heading "done"
