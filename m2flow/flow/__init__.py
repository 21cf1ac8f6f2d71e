"""Flow (what happens), Plan (where, in what slices, in whose turn), Cluster (what there is): values, no torch."""
