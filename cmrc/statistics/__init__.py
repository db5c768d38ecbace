"""What calibration measures at sites, in one pass over data.

batches      data in, batch by batch          calibrate    the pass
stats        sums that merge, and their file  curvature    derivatives of a loss by the values of a site
readers      the ops that read a site         distributed  the same under torchrun
"""
