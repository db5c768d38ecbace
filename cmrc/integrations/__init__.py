"""cmrc inside tools that people already run. Each module imports its tool when it is used, and is loaded by nobody else."""
