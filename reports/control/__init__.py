"""The page of a run with a control plane: what became of every operation while replies were lost and services died."""
