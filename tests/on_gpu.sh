#!/usr/bin/env bash
# The whole suite on a machine with a GPU and no network: builds in place, then doctor, demo, and every test marked `gpu`.
# Further arguments go to pytest. What torch's machine lacks (breakable-cuda-graphs) may lie as wheels in .whl/. Needs torch, Cython, setuptools, pytest, pytest-timeout and a C compiler.
set -uo pipefail
cd "$(dirname "$0")/.."
python3 -m pip install --no-build-isolation --no-deps -e . -q || exit 1
[ -d .whl ] && python3 -m pip install -q --no-index --no-deps --upgrade --target "${TMPDIR:-/tmp}/arena-wheels" .whl/*.whl
export PYTHONPATH="${TMPDIR:-/tmp}/arena-wheels${PYTHONPATH:+:$PYTHONPATH}"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
python3 -m arena doctor
python3 -m arena demo
python3 -m pytest -m gpu -q -ra "$@"
