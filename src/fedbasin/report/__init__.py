"""Room 8: run records to tables and figures. Nothing here needs a tensor."""
