"""Interventions on the units that stay: run them, count agreement, certify it.

interpreter    runs interventions             interventions  swaps, patches, and how they are drawn
verifier       cmrc.verify                    result         what it found, as text, JSON and pictures
evidence       what one swap shows            bounds         intervals for proportions and means
certificates   what may be concluded, at which level
"""
