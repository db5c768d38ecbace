#!/usr/bin/env bash
# Run the tests; arguments go to pytest, e.g. bash tests/run.sh -k affine
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source .ci/venv
use_venv torch,cpu,dev
python -m pytest -q -n 2 "$@"
