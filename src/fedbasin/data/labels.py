"""Class names of the catalogue's datasets, in the order of their labels."""

from __future__ import annotations

import string


def _words(text: str) -> tuple[str, ...]:
    """Split a text into names."""
    return tuple(text.split())


DIGITS = tuple(string.digits)

FASHION = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)

CIFAR10 = _words("airplane automobile bird cat deer dog frog horse ship truck")

CIFAR100 = _words(
    """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus
    butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch
    crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo
    keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse
    mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy
    porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper
    snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television
    tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
    """
)

CIFAR100_COARSE = _words(
    """
    aquatic_mammals fish flowers food_containers fruit_and_vegetables household_electrical_devices
    household_furniture insects large_carnivores large_man-made_outdoor_things
    large_natural_outdoor_scenes large_omnivores_and_herbivores medium-sized_mammals
    non-insect_invertebrates people reptiles small_mammals trees vehicles_1 vehicles_2
    """
)

PACS = _words("dog elephant giraffe guitar horse house person")

FEMNIST = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)

# The 80 characters of LEAF's Shakespeare, and one class for any other character.
UNKNOWN = "<unknown>"
CHARACTERS = (
    *"\n !\"&'(),-.0123456789:;>?",
    *string.ascii_uppercase,
    *"[]",
    *string.ascii_lowercase,
    "}",
    UNKNOWN,
)
