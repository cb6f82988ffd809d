"""Room 7: what vectors and cohort matrices say about why averaging works."""
