"""From statistics to a plan.

planner       the whole of it: cmrc.plan        recipe        what to do, as data; recipe_file: as a file
objectives    how much a unit matters           selection     which units go, together or one by one
ranking       both, for one site                counts        how many units each site keeps
allocate      one budget for all sites          probe         what cutting one site does to the output
replacements  the do's that follow              fits          the formulas of constants and affine maps
stream        fits in order, site after site        usable        which sites are planned, and whether their statistics serve
progress      plans that resume                 certified     the smallest plan whose certificate holds
diagnose      predictions beside measurements   plots         pictures of scores
"""
