"""The page of a run: one HTML file with everything a run folder tells, to show to colleagues."""
