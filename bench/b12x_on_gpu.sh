#!/usr/bin/env bash
# Real B12X on a machine with a GPU and no network: unpacks .b12x/site.tar.xz (bench/b12x_pack.sh makes it), builds arena in
# place and runs bench/b12x_mhc.py. Writes its table to $1 (default: bench/results/<gpu>-<date>-b12x.txt); further arguments go
# to it: --quick for a first look. Needs torch, Cython, setuptools and a C compiler.
set -euo pipefail
cd "$(dirname "$0")/.."
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -1 | tr ' ' '-' | tr '[:upper:]' '[:lower:]')
report=${1:-bench/results/$gpu-$(date +%Y-%m-%d)-b12x.txt}
shift || true
site=${TMPDIR:-/tmp}/arena-b12x-site
if [ ! -f "$site/.unpacked" ]; then
  rm -rf "$site"
  mkdir -p "$site"
  # xz may be missing there; Python's own is not.
  tar -xJf .b12x/site.tar.xz -C "$site" --no-same-owner || python3 -m tarfile -e .b12x/site.tar.xz "$site"
  touch "$site/.unpacked"
fi
python3 -m pip install --no-build-isolation --no-deps -e . -q
mkdir -p "$(dirname "$report")"
# Where it can be written, and where the next run, and the control's process, find the kernels.
export B12X_COMPILE_CACHE_DIR=${B12X_COMPILE_CACHE_DIR:-$site-kernels}
export PYTHONPATH="$site:$site/nvidia_cutlass_dsl/dsl_packages${PYTHONPATH:+:$PYTHONPATH}"
python3 bench/b12x_mhc.py "$report" "$@"
