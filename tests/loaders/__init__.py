"""Fuzzing of everything that cmrc reads from a file: plans, statistics, recipes, models and data.

samples.py    valid files, to start from      mutate.py     changes that know the format of a file
reading.py    one case to one outcome         engine.py     coverage-guided, with atheris (`python -m tests.loaders`)

A case is read, and used as the commands use it. An outcome is `read` or `refused`, with a CmrcError; on the command line exit
code 0, 1 or 2, and one message. Any other exception, a case that takes long, and memory beyond `reading.MEMORY` are failures.
"""
