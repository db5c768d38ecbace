#!/usr/bin/env bash
# Measure everything and write docs/benchmarks.md. With --quick: see that it all runs, and leave records and page alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source .ci/venv
use_venv torch,cpu,dev,bench

records=benchmarks/records page=docs/benchmarks.md
if [[ " $* " == *" --quick "* ]]; then
    records=$(mktemp -d)
    trap 'rm -rf "$records"' EXIT
    page=$records/benchmarks.md
fi
python -m benchmarks.compile_cost --json "$records/compile_cost.json" "$@"
python -m benchmarks.latency --json "$records/latency.json" "$@"
python -m benchmarks.llm_size --json "$records/llm_size.json" "$@"
python -m benchmarks.depth --json "$records/depth.json" "$@"
python -m benchmarks.calibration --json "$records/calibration.json" "$@"
python -m benchmarks.selection --json "$records/selection.json" "$@"
python -m benchmarks.verification boolean --json "$records/verification_boolean.json" "$@"
python -m benchmarks.verification mnist --json "$records/verification_mnist.json" "$@"
python -m benchmarks.coverage --json "$records/coverage.json" "$@"
python -m benchmarks.interventions --json "$records/interventions.json" "$@"
python -m benchmarks.report --records "$records" --out "$page"
