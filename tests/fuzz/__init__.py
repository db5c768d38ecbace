"""Differential fuzzing: random models times random plans, each lowered and compared with a clamp of its own.

graphs.py     random ONNX graphs            modules.py    random torch modules          plans.py     random do's
clamp.py      the reference                 judge.py      one case to one outcome       minimise.py  a failure made small
case.py       a case as JSON                __main__.py   `python -m tests.fuzz`        regressions/ failures of the past

An outcome is `equal`, `kept` (equal, with a clamp or gather left at run time) or `refused`; anything else is a failure.
"""
