"""Names and nouns that fill the word problems.

Their order is part of the recipe: a seed gives the same problems only while no list changes.
"""

from __future__ import annotations

SHE = [
    "Maria", "Lucy", "Emma", "Anna", "Sara", "Nina", "Olivia", "Grace", "Ruth", "Alice", "Julia", "Clara",
    "Hannah", "Ivy", "Mia", "Zoe", "Priya", "Leila", "Yuki", "Fatima", "Rosa", "Elena", "Amara", "Chloe",
    "Daisy", "Ella", "Freya", "Holly", "Jane", "Kate", "Laura", "Megan", "Nora", "Paula", "Rachel", "Sofia",
    "Tara", "Wendy",
]  # fmt: skip
HE = [
    "Tom", "Jack", "Ben", "Omar", "Luis", "David", "Peter", "Sam", "Leo", "Max", "Noah", "Adam", "Carlos",
    "Daniel", "Ethan", "Felix", "George", "Henry", "Ivan", "James", "Kevin", "Liam", "Mark", "Nathan", "Oscar",
    "Paul", "Raj", "Simon", "Tim", "Victor", "Will", "Yusuf", "Ahmed", "Chen", "Diego", "Hugo", "Jonas",
    "Marco",
]  # fmt: skip
THINGS = [
    "apples", "oranges", "marbles", "stickers", "pencils", "books", "cookies", "stamps", "coins", "shells",
    "balloons", "cards", "beads", "buttons", "candies", "crayons", "cupcakes", "eggs", "flowers", "grapes",
    "keys", "lemons", "muffins", "nuts", "peaches", "pears", "photos", "plums", "postcards", "ribbons", "rocks",
    "toys", "tomatoes", "badges", "magnets", "notebooks", "peanuts", "cherries", "acorns", "bottles",
]  # fmt: skip
PACKS = [
    "bags", "boxes", "packs", "baskets", "jars", "crates", "trays", "bundles",
]  # fmt: skip
GOODS = [
    "notebook", "pen", "shirt", "hat", "mug", "ticket", "sandwich", "toy car", "lamp", "scarf", "plate",
    "puzzle", "basketball", "comic book", "candle", "cap", "poster", "bowl", "belt", "teddy bear", "plant",
    "cake", "pizza",
]  # fmt: skip
KIN = [
    "sister", "brother", "cousin", "friend", "neighbor", "classmate",
]  # fmt: skip
DAYS = [
    "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday",
]  # fmt: skip
TREES = [
    "apple trees", "pine trees", "rose bushes", "tomato plants", "cherry trees", "tulips", "bean plants",
]  # fmt: skip
WORK = [
    "mows lawns", "walks dogs", "washes cars", "works in a bakery", "works in a shop", "paints fences",
    "delivers newspapers", "teaches piano", "works in a library", "babysits",
]  # fmt: skip
