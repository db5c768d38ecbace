"""From statistics to a plan.

planner      the whole of it: cmrc.plan       recipe       what to do, as a file
objectives   how much a unit matters          selection    which units go
fits         what replaces them               allocate     how many units each site keeps
stream       fits in order, one site after the other
certified    the smallest plan whose certificate holds
diagnose     predictions beside measurements  plots        pictures of scores
"""
