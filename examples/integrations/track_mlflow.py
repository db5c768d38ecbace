"""A reduction in MLflow, with a local store: python track_mlflow.py (needs mlflow-skinny or mlflow)."""

from __future__ import annotations

import mlflow

import cmrc
from cmrc.integrations.mlflow import log_reduction

mlflow.set_tracking_uri("file:mlruns")
mlflow.set_experiment("digits")
with mlflow.start_run(run_name="agreement 0.95") as run:
    result = cmrc.reduce(
        "model.onnx", "train.npz", held_out="test.npz", agreement=0.95, frontier=(0.7, 0.5), refit=False, timed=False
    )
    log_reduction(result)
print(run.info.run_id, result.verdict)
