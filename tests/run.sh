#!/usr/bin/env bash
# Run the tests; arguments go to pytest:
#   bash tests/run.sh                every test
#   bash tests/run.sh --quick        the inner loop: under two minutes on two quiet cores
#   bash tests/run.sh -k affine      what a name says
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source .ci/venv
use_venv torch,cpu,dev
python -m pytest -q -n 2 "$@"
