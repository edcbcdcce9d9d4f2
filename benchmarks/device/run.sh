#!/usr/bin/env bash
# Check and measure the devices of this machine, in under 8 minutes: ./run.sh [auto|npu|cuda|cpu]
# Packages that are missing are installed into a virtual environment of its own.
set -euo pipefail
cd "$(dirname "$0")/../.."
device=${1:-auto}
export TORCH_DEVICE_BACKEND_AUTOLOAD=0

if ! python3 -c 'import torch, tyro, safetensors, pytest, pytest_timeout' 2>/dev/null; then
    python3 -m venv --system-site-packages "${TMPDIR:-/tmp}/npu_pipe_venv"
    # shellcheck disable=SC1091
    source "${TMPDIR:-/tmp}/npu_pipe_venv/bin/activate"
    pip install -q -e '.[test]'
fi

echo "== checks"
python3 -m pytest -q -p no:cacheprovider tests/gloo/test_device.py tests/gloo/test_device_link.py \
    tests/gloo/test_cuda.py
echo "== measured"
python3 benchmarks/device/run.py --device "$device" --json "${OUT:-.}/device.json"
