"""One replacement: units of a site become constants, or an affine function of units that stay.

    x[units] := constant                           do(units := c)
    x[units] := weight · x[parents] + constant     do(units := B · parents + β)

`checked_do` checks a request against the site and the do's before it, and answers in the user's words. `put_dos` writes do's into the IR.
"""

from __future__ import annotations
