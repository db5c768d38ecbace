"""A traced model, the plans for it, and lowering one by the other.

trace       a model into a Program                     program   the traced model
sites       what a user can point at                   groups    units that are coupled
do          one replacement                            plan      the ordered do's
plan_file   the plan as files                          check     lowered against clamped
dry_run     how a replaced unit would fold             lower     model + plan into a smaller model
provenance  where a lowered file comes from
report      what a lowering did                        reach     how much of a model sites reach
"""
