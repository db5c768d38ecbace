"""The rewrites of the IR, one per file. Passes are pure: graph in, graph out, and they import only the IR.

constant_fold   do(units := constants) sinks along the data flow into the next affine op
affine_fold     do(units := B · parents + β) sinks in the same way
dead_subgraph   select rises against the data flow, and dead nodes are removed
interchange     cuts a graph at sites, for interventions
pipeline        runs the first three until nothing moves
rewriting       what they share
"""
