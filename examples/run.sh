#!/usr/bin/env bash
# Reduce the digits classifier by one command. Needs no torch. Arguments are added to the command: bash examples/run.sh --pick 0.4
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source .ci/venv
use_venv cpu
mkdir -p examples/out
cd examples
python -m cmrc reduce digits.onnx --data digits_train.npz --held-out digits_test.npz --agreement 0.97 -o out/small.onnx "$@"
