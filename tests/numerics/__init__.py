"""How far `check` is from a false alarm, and from missing a wrong fold: `python -m tests.numerics` measures it on trained networks."""
