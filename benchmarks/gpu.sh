#!/usr/bin/env bash
# What can be seen on a machine with GPUs, in under eight minutes:
#
#   benchmarks/gpu.sh                  doctor, same bits, the cost of a step, models that fill a GPU
#   benchmarks/gpu.sh --small          the same program on two simulated CPU devices, in a minute
#   PYTHON=... benchmarks/gpu.sh       another Python than .venv's
#
# For GPUs install JAX's own build first: .venv/bin/pip install 'jax[cuda13]' (or cuda12).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-.venv/bin/python}
here=(--devices 1,1)
same=(digits --towers 8 --steps 3)
overhead=(--rounds 7)
models=(--rounds 5 --steps 10)
if [[ ${1:-} == --small ]]; then
  here=(--simulate 1,1)
  same=(examples/own_recipe/recipe.py --towers 2 --steps 1)  # is compiled in a moment
  overhead=(--rounds 2 --only Polynomial)
  models=(--small --rounds 2 --steps 2)
fi

heading() { printf '\n== %s (%d s)\n' "$*" "$SECONDS"; }

heading "doctor"
"$python" -m multitower doctor
heading "the same bits on one device, twice"
"$python" -m multitower verify "${same[@]}" "${here[@]}"
if [[ ${1:-} != --small ]]; then
  count=$("$python" -c 'import multitower as mt; print(len(mt.devices("gpu")))')
  if ((count > 1)); then
    heading "the same bits on 1 and on $count devices"
    "$python" -m multitower verify "${same[@]}" --devices "1,$count"
  fi
  overhead+=(--devices "$count" --real)
fi
heading "the cost of a step"
"$python" benchmarks/step_overhead.py "${overhead[@]}"
heading "models that fill a GPU"
"$python" benchmarks/gpu_steps.py "${models[@]}"
heading "done"
