#!/usr/bin/env bash
# Ask every model of the zoo and write docs/coverage.md; goes on where it stopped. Arguments: see matrix.py
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source .ci/venv
use_venv torch,cpu,dev,bench
OMP_NUM_THREADS=1 python tests/zoo/matrix.py "$@"
