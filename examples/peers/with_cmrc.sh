#!/usr/bin/env bash
# cmrc: bash with_cmrc.sh, in a folder where job.py has left model.onnx
set -euo pipefail
data=$(dirname "${BASH_SOURCE[0]}")/..

# the job
cmrc reduce model.onnx --data "$data/digits_train.npz" --held-out "$data/digits_test.npz" --keep 0.5 -o small.onnx

# end
