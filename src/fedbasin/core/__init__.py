"""The words all rooms share: vectors, replies, methods, rules, randomness, records."""
