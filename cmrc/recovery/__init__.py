"""A lowered model trained for a while towards the original: label-free, on the user's own data.

recover.py      the way from a lowered model to a recovered one: rounds of steps, judged on held-out data
refits.py       before that, least squares of every affine op towards the original's, in order
affine.py       which ops those are, with their weights as matrices
lessons.py      rows of data, and what the original makes of them
parameters.py   what is trained, and which inner values are compared
saving.py       the state of an interrupted run
"""
