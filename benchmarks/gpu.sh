#!/usr/bin/env bash
# What can be seen on a machine with GPUs. Each part takes under ten minutes on one GPU:
#
#   benchmarks/gpu.sh              scatter and steps: begin with these
#   benchmarks/gpu.sh brief        some of most parts: where there is a GPU for ten minutes only
#   benchmarks/gpu.sh scatter      what a deterministic scatter-add costs: under two minutes
#   benchmarks/gpu.sh steps        doctor, the same bits of one recipe, the cost of a step
#   benchmarks/gpu.sh models       models that fill a GPU, against hand-written JAX
#   benchmarks/gpu.sh tuned        the same models: what choosing kernels by their times would bring
#   benchmarks/gpu.sh attention    the transformer with cuDNN's attention, scanned and unrolled
#   benchmarks/gpu.sh torch        the same models, against compiled PyTorch
#   benchmarks/gpu.sh keras        the same models, against Keras on JAX
#   benchmarks/gpu.sh bits         the same bits by kernel, precision, run, process and towers
#   benchmarks/gpu.sh verify       the same bits of recipes
#   benchmarks/gpu.sh devices      visible GPUs, memory fractions, a plan against the memory
#   benchmarks/gpu.sh text         a language model: trained, sampled, profiled
#   benchmarks/gpu.sh processes    two processes that share a GPU, where NCCL lets them
#   benchmarks/gpu.sh pipeline     whether batches come as fast as the GPU takes them
#
#   benchmarks/gpu.sh --small PART...    the same programs on simulated CPU devices, to test them
#
# A command that fails or takes too long does not end the script: the last lines name it, and the
# exit code is 1.
#
# PYTHON chooses an interpreter other than .venv's. It needs JAX's own build for GPUs: for .venv,
# run .venv/bin/pip install 'jax[cuda13]' (or cuda12). The first lines say which modules are missing.
# For a machine without a network, fetch these on another one, and take the folder along:
#
#   pip download --no-deps --dest wheels tyro docstring-parser typeguard tensorboardX keras namex
#   pip download --no-deps --only-binary=:all: --python-version 3.12 --dest wheels optree
#   for wheel in wheels/*.whl; do python3 -m zipfile -e "$wheel" packages; done
#   PYTHON=python3 PYTHONPATH=$PWD/packages benchmarks/gpu.sh
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

python=${PYTHON:-.venv/bin/python}
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1  # what was printed before a time limit is seen
small=
if [[ ${1:-} == --small ]]; then
  small=--small
  shift
fi
failures=()
running=
trap '[[ $running ]] && kill "$running" 2>/dev/null; exit 130' INT TERM

heading() { printf '\n== %s (%d s)\n' "$*" "$SECONDS"; }

# attempt SECONDS COMMAND...: the command with a time limit. Failures are remembered.
attempt() {
  local limit_s=$1 code
  shift
  timeout --kill-after=5 "$limit_s" "$@" &
  running=$!
  wait "$running"
  code=$?
  running=
  ((code == 0)) && return
  local said="$*" why="exit code $code"
  ((code == 124)) && why="stopped after $limit_s s"
  failures+=("${said#"$python "}: $why")
  echo "FAILED: ${failures[-1]}"
}

# multitower SECONDS COMMAND OPTION...: the command line.
multitower() { attempt "$1" "$python" -m multitower "${@:2}"; }

# same_bits SECONDS RECIPE OPTION...: on one device, twice, and on all of them.
same_bits() {
  local where=(--devices "1,1$many")
  [[ $small ]] && where=(--simulate 1,1)
  heading "the same bits: ${*:2}"
  multitower "$1" verify "${@:2}" "${where[@]}"
}

scatter() {
  heading "deterministic scatter-adds"
  attempt 115 "$python" benchmarks/gpu_scatter.py $small
}

steps() {
  local overhead=(--rounds 7 --devices "$count" --real)
  if [[ $small ]]; then
    overhead=(--rounds 2 --only Polynomial)
  fi
  heading "doctor"
  multitower 120 doctor
  same_bits 120 "${recipe[@]}"
  heading "the cost of a step"
  attempt 300 "$python" benchmarks/step_overhead.py "${overhead[@]}"
}

models() {
  local options=(--rounds 5 --steps 10)
  [[ $small ]] && options=(--small --rounds 2 --steps 2)
  heading "models that fill a GPU"
  attempt 580 "$python" benchmarks/gpu_steps.py "${options[@]}" "$@"
}

tuned() { models --contenders hand-written,deterministic,tuned; }

attention() {
  local options=(--only transformer --untried)
  [[ $small ]] || options+=(--attention cudnn)  # no CPU has it
  models "${options[@]}"
  models "${options[@]}" --unroll
}

torch() { models --peers torch --contenders hand-written; }

keras() { models --peers keras --contenders hand-written; }

bits() {
  local options=()
  [[ $small ]] && options=(--small --only product,sort --towers 1,2)
  heading "the same bits by kernel"
  attempt 580 "$python" benchmarks/gpu_bits.py "${options[@]}"
}

verify() {
  heading "the same bits of recipes"
  attempt 580 "$python" benchmarks/gpu_recipes.py $small
}

devices() {
  heading "device control, and plans"
  attempt 580 "$python" benchmarks/gpu_devices.py $small
}

# Each command's limit is a share of ten minutes: one that is slow cannot take the others' time.
brief() {
  local kernels=(--only "product,convolution,attention,embedding,max pooling" --towers 1,8)
  local overhead=(--rounds 3 --devices "$count" --real)
  local steps=(--only transformer --rounds 3 --steps 10)
  if [[ $small ]]; then
    kernels=(--small --only product --towers 2)
    overhead=(--rounds 2 --only Polynomial)
    steps=(--small --only lenet --rounds 2 --steps 1)
  fi
  heading "doctor"
  multitower 45 doctor
  same_bits 60 "${recipe[@]}"
  heading "the same bits by kernel"
  attempt 130 "$python" benchmarks/gpu_bits.py "${kernels[@]}"
  if [[ ! $small ]]; then
    same_bits 70 gpt --towers 8 --steps 3 --compute-dtype bfloat16
    same_bits 80 cifar10-resnet20 --synthetic --towers 8 --steps 3
  fi
  heading "the cost of a step"
  attempt 70 "$python" benchmarks/step_overhead.py "${overhead[@]}"
  heading "a model that fills a GPU"
  attempt 120 "$python" benchmarks/gpu_steps.py "${steps[@]}"
}

text() {
  local runs model=(gpt --size small --towers 8 --batch-size 64) long=(--steps 200)
  local short=(--steps 20 --profile 15:18)
  if [[ $small ]]; then
    model=(gpt --size micro --towers 2 --batch-size 8 --simulate 2)
    long=(--steps 4)
    short=(--steps 4 --profile 2:3)
  fi
  runs=$(mktemp -d)
  for dtype in bfloat16 float32; do
    heading "a language model, $dtype"
    multitower 180 train "${model[@]}" "${long[@]}" --compute-dtype $dtype --run-dir "$runs/$dtype"
  done
  heading "text from it"
  multitower 60 sample "$runs/bfloat16" --prompt 'def ' --bytes 200
  heading "a profile of it"
  multitower 120 train "${model[@]}" "${short[@]}" --compute-dtype bfloat16 --run-dir "$runs/profile"
}

# NCCL has refused two ranks on one GPU for long: its answer is what this shows.
processes() {
  local where=()
  [[ $small ]] && where=(--simulate 1)
  heading "two processes on one GPU"
  JAX_LOCAL_DEVICE_IDS=0 XLA_PYTHON_CLIENT_MEM_FRACTION=0.3 NCCL_MULTI_RANK_GPU_ENABLE=1 \
    attempt 150 bash -c '"$0" "$@" --process-id 1 & "$0" "$@" --process-id 0 && wait "$!"' \
    "$python" -m multitower verify "${recipe[@]}" "${where[@]}" \
    --coordinator localhost:47113 --num-processes 2
}

pipeline() {
  local options=(--rounds 5 --real)
  [[ $small ]] && options=(--rounds 1)
  heading "the input pipeline"
  attempt 300 "$python" benchmarks/input_pipeline.py "${options[@]}"
}

heading "the interpreter"
"$python" benchmarks/gpu_modules.py || exit
if [[ $small ]]; then
  count=2
else
  count=$("$python" -c 'import multitower as mt; print(len(mt.devices("gpu")))') || exit
fi
recipe=(digits --towers 8 --steps 3)
[[ $small ]] && recipe=(examples/own_recipe/recipe.py --towers 2 --steps 1)  # is compiled in a moment
many=
((count > 1)) && many=,$((count < 8 ? count : 8))  # as many as there are towers
(($#)) || set -- scatter steps
for part; do
  case $part in
    brief | scatter | steps | models | tuned | attention | torch | keras | bits | verify | devices | text | processes | pipeline) "$part" ;;
    *)
      echo "gpu.sh: there is no part $part. Parts are brief, scatter, steps, models, tuned, attention, torch," \
        "keras, bits, verify, devices, text, processes and pipeline." >&2
      exit 2
      ;;
  esac
done
heading "done"
((${#failures[@]} == 0)) && exit
printf 'failed: %s\n' "${failures[@]}"
exit 1
