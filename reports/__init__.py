"""Reports: a run folder in, one HTML file out."""
