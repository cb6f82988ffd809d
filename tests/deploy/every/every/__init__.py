"""Many methods one after another."""
