#!/usr/bin/env bash
# All benchmarks on a machine with a GPU and no network. Writes the report to $1 (default: bench/results/<gpu>-<date>.txt) with
# the machine and the versions that it came from.
set -euo pipefail
cd "$(dirname "$0")/.."
python3 -m pip install --no-build-isolation --no-deps -e . -q
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -1 | tr ' ' '-' | tr '[:upper:]' '[:lower:]')
report=${1:-bench/results/$gpu-$(date +%Y-%m-%d).txt}
mkdir -p "$(dirname "$report")"
{
  echo "machine: $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -1); $(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -1), $(nproc) cores"
  echo "versions: $(python3 -c 'import platform, torch, arena; print("python", platform.python_version(), "torch", torch.__version__, "arena", arena.__version__)'), $(gcc --version | head -1)"
  echo "date: $(date +%Y-%m-%d)"
  python3 -m pytest bench -q -p no:cacheprovider --benchmark-disable-gc 2>&1
} | tee "$report"
