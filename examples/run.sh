#!/usr/bin/env bash
# Reduce the digits classifier on the ONNX path. Needs no torch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source .ci/venv
use_venv cpu
python examples/digits.py "$@"
