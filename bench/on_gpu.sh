#!/usr/bin/env bash
# Benchmarks on a machine with a GPU and no network: all of them, or those given after the report. Writes the report to $1
# (default: bench/results/<gpu>-<date>.txt) with the machine and the versions that it came from. The workspace is measured beside
# vLLM's own where .vllm/ is there (tests/vllm_on_gpu.sh says how to fill it).
set -euo pipefail
cd "$(dirname "$0")/.."
python3 -m pip install --no-build-isolation --no-deps -e . -q
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -1 | tr ' ' '-' | tr '[:upper:]' '[:lower:]')
report=${1:-bench/results/$gpu-$(date +%Y-%m-%d).txt}
shift || true
plugins=()
if [ -d .vllm ]; then
  export ARENA_VLLM_RIG=${ARENA_VLLM_RIG:-${TMPDIR:-/tmp}/arena-vllm} ARENA_VLLM_MODE=stock VLLM_TARGET_DEVICE=cpu
  [ -d "$ARENA_VLLM_RIG" ] || python3 tests/vllm_rig.py unpack .vllm "$ARENA_VLLM_RIG"
  export PYTHONPATH=tests:$ARENA_VLLM_RIG/vllm:$ARENA_VLLM_RIG/site
  plugins=(-p vllm_plugin)
fi
mkdir -p "$(dirname "$report")"
{
  echo "machine: $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -1); $(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -1), $(nproc) cores"
  echo "versions: $(python3 -c 'import platform, torch, arena; print("python", platform.python_version(), "torch", torch.__version__, "arena", arena.__version__)'), $(gcc --version | head -1)"
  echo "date: $(date +%Y-%m-%d)"
  python3 -m pytest "${@:-bench}" "${plugins[@]}" -q -p no:cacheprovider --benchmark-disable-gc 2>&1
} | tee "$report"
