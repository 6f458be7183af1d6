#!/bin/sh
# Makes the virtual environments of the contenders that are not on JAX, from pinned requirements:
#
#   benchmarks/peers/setup.sh                      both: 6 GB on the disk, most of it PyTorch
#   benchmarks/peers/setup.sh tensorflow           one of: torch, tensorflow
#   PYTHON=python3.13 benchmarks/peers/setup.sh    another Python; 3.12 or newer
#
# They go to .venv-peers/ in the repository's root, which git ignores. torch.compile also needs a
# C++ compiler (g++). The contenders on JAX use the interpreter that runs compare.py.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' || {
    echo "The pinned packages need Python 3.12 or newer: PYTHON=python3.13 benchmarks/peers/setup.sh" >&2
    exit 2
}

for name in ${*:-torch tensorflow}; do
    requirements="$here/requirements-$name.txt"
    [ -f "$requirements" ] || { echo "no environment $name: say torch or tensorflow" >&2; exit 2; }
    "$python" -m venv --clear "$root/.venv-peers/$name"
    "$root/.venv-peers/$name/bin/python" -m pip install --quiet --no-deps -r "$requirements"
    echo ".venv-peers/$name is ready"
done
