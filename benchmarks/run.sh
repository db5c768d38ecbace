#!/usr/bin/env bash
# Measure every table and write docs/results.md; arguments as of `python -m benchmarks`, e.g. bash benchmarks/run.sh --quick
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source .ci/venv
use_venv torch,cpu,dev,bench
python -m benchmarks "$@"
