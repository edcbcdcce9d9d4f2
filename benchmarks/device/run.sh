#!/usr/bin/env bash
# Check and measure the devices of this machine, in under 8 minutes: ./run.sh [auto|npu|cuda|cpu]
# Packages that are missing are installed into a virtual environment of its own.
set -euo pipefail
cd "$(dirname "$0")/../.."
device=${1:-auto}
export TORCH_DEVICE_BACKEND_AUTOLOAD=0
step() { printf '\n== %s  (after %d s)\n' "$1" "$SECONDS"; }

if ! python3 -c 'import torch, tyro, rich, safetensors, tomli_w, pytest, pytest_timeout' 2>/dev/null; then
    step "packages"
    python3 -m venv --system-site-packages "${TMPDIR:-/tmp}/npu_pipe_venv"
    # shellcheck disable=SC1091
    source "${TMPDIR:-/tmp}/npu_pipe_venv/bin/activate"
    pip install -q -e '.[test]'
fi

step "checks"
# Where there is no GPU, the NVIDIA tier says so.
timeout 200 python3 -m pytest -q -p no:cacheprovider tests/gloo/test_device.py \
    tests/gloo/test_device_link.py tests/gloo/test_cuda.py
step "numbers: a pipeline against the unsplit model"
timeout 100 python3 -m npu_pipe verify configs/gpt_tiny.toml --device "$device" --pipeline.ranks 1 \
    --pipeline.microbatches 2 --data.batch 4
step "times"
timeout 160 python3 benchmarks/device/run.py --device "$device" --json "${OUT:-.}/device.json"
step "done"
