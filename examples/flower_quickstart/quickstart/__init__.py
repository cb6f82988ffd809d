"""An ordinary Flower app."""
