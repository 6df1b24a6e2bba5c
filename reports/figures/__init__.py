"""Figures: a run folder in, a fragment of HTML out (inline SVG, coloured by the variables of the page)."""
