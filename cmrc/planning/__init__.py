"""From statistics to a plan.

planner       cmrc.plan, from start to end      recipe        what to do, as data; recipe_file: as a file
objectives    how much a unit matters           selection     which units are replaced, together or one by one
ranking       both, for one site                counts        how many units each site keeps
allocate      one budget for all sites          probe         what cutting one site does to the output
replacements  the do's that follow              fits          the formulas of constants and affine maps
stream        fits in order, site after site        usable        which sites are planned, and whether their statistics can be used
progress      plans that resume                 certified     the smallest plan whose certificate holds
diagnose      predictions and measurements     plots         pictures of scores
bases         fewer units inside the heads of attention, in the basis that loses least
"""
