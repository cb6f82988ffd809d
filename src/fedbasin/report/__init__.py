"""Room 8: run records to tables, tests, figures and one page. Nothing here needs a tensor."""
