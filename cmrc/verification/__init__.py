"""Interventions on the retained units: run them, count how often both models agree, certify it.

interpreter    runs interventions                 pieces         a graph cut at sites, ready to run
interventions  swaps and patches, as data         draws          which inputs meet, which units are swapped
verifier       swaps in both models               evidence       what one swap shows
protocol       cmrc.verify, better, ...           result         what they return: verdict, text, JSON, picture
targets        what a run can decide              certificates   the ladder of lower bounds
bounds         for means of independent values    distortion     D2 from calibration statistics, without swaps
"""
