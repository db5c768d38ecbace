"""Measurements of cmrc against other tools and against models built small. `bash benchmarks/run.sh` runs all."""
