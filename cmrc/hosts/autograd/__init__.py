"""The IR in torch: a second evaluator, with gradients, beside the one in numpy that defines what ops mean.

functions.py    the functions of `pointwise` and `along`, one row each
meanings.py     the ops, one row each
network.py      a graph that runs with autograd; what has no meaning runs on its host, and stops gradients
derivatives.py  gradient and curvature of a loss by inner values
learner.py      steps of training towards a teacher
arrays.py       numpy and torch, back and forth
"""
