"""What several methods are made of: memories, windows, heads, momenta, training on the server."""
