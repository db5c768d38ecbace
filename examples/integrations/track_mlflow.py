"""A reduction in MLflow, with a local store: python track_mlflow.py (needs cmrc[report] and mlflow, or mlflow-skinny with alembic and sqlalchemy)."""

from __future__ import annotations

import mlflow

import cmrc
from cmrc.integrations.mlflow import log_reduction

mlflow.set_tracking_uri("sqlite:///mlflow.db")
mlflow.set_experiment("digits")
with mlflow.start_run(run_name="agreement 0.95") as run:
    result = cmrc.reduce(
        "model.onnx", "train.npz", held_out="test.npz", agreement=0.95, frontier=(0.7, 0.5), refit=False, timed=False
    )
    log_reduction(result, name="digits")
stored = mlflow.get_run(run.info.run_id)
print(result.verdict)
print(stored.data.params, stored.data.metrics)
logged = {item.path for item in mlflow.MlflowClient().list_artifacts(run.info.run_id, "cmrc")}
assert {"cmrc/small.onnx", "cmrc/small.plan.json", "cmrc/reduction.json", "cmrc/report.html"} <= logged, logged
assert stored.data.metrics["exact"] == 1.0
assert len(mlflow.MlflowClient().get_metric_history(run.info.run_id, "agreement")) == len(result.sizes)
