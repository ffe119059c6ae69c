#!/usr/bin/env bash
# vLLM's own tests and its real graph holders on a machine with a GPU and no network. Before that, on one with a network:
#   python tests/vllm_rig.py pack .vllm
# which fills the ignored folder .vllm (32 MB) that is then carried along. Further arguments go to pytest.
set -uo pipefail
cd "$(dirname "$0")/.."
export ARENA_VLLM_RIG=${ARENA_VLLM_RIG:-${TMPDIR:-/tmp}/arena-vllm} VLLM_TARGET_DEVICE=cpu
python3 -m pip install --no-build-isolation --no-deps -e . -q || exit 1
[ -d "$ARENA_VLLM_RIG" ] || python3 tests/vllm_rig.py unpack .vllm "$ARENA_VLLM_RIG" || exit 1
export PYTHONPATH=$ARENA_VLLM_RIG/vllm:$ARENA_VLLM_RIG/site${PYTHONPATH:+:$PYTHONPATH}
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
python3 -m pytest -m gpu -q -ra tests/test_vllm_own.py tests/test_vllm_graphs.py "$@"
