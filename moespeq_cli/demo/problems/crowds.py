"""Problems about seats, passengers, animals, pupils, plants and workers."""

from __future__ import annotations

from moespeq_cli.demo.problems.protagonist import Protagonist, Worked, count_of, template
from moespeq_cli.demo.problems.words import DAYS, TREES


@template
def seats(p: Protagonist) -> Worked:
    r, c = p.int(4, 15), p.int(4, 20)
    t = r * c
    o = p.int(5, t - 3)
    question = p.choose(
        f"A theater has {r} rows with {c} seats in each row. {o} seats are taken. How many seats are empty?",
        f"There are {r} rows of {c} chairs in a hall. If {o} people sit down, how many chairs stay free?",
    )
    return question, [f"There are {r} * {c} = {t} seats.", f"{t} - {o} = {t - o} seats are empty."], t - o


@template
def points(p: Protagonist) -> Worked:
    a, b, c = p.int(2, 15), p.int(2, 12), p.int(1, 12)
    u, v = 2 * a, 3 * b
    throws = count_of(c, "free throw")
    question = p.choose(
        (
            f"In a basketball game {p.name} made {a} two-point shots, {b} three-point shots and {throws} "
            f"worth one point each. How many points did {p.he} score?"
        ),
        (
            f"{p.name}'s team made {a} two-point shots, {b} three-point shots and {throws} of one point. "
            "How many points is that?"
        ),
    )
    steps = [
        f"The two-point shots give 2 * {a} = {u} points.",
        f"The three-point shots give 3 * {b} = {v} points.",
        f"The total is {u} + {v} + {c} = {u + v + c} points.",
    ]
    return question, steps, u + v + c


@template
def bus(p: Protagonist) -> Worked:
    a, b = p.int(10, 60), p.int(2, 25)
    c = p.int(2, a - 3)
    v = p.pick(["bus", "train", "boat", "tram"])
    question = p.choose(
        (
            f"There are {a} people on a {v}. At the first stop {c} people get off and {b} get on. "
            f"How many people are on the {v} now?"
        ),
        (
            f"A {v} carries {a} passengers. {c} of them leave at a stop and {b} new passengers enter. "
            f"How many passengers are on the {v}?"
        ),
    )
    steps = [
        f"After {c} leave there are {a} - {c} = {a - c}.",
        f"Then there are {a - c} + {b} = {a - c + b}.",
    ]
    return question, steps, a - c + b


@template
def recipe(p: Protagonist) -> Worked:
    e, n = p.int(2, 6), p.int(2, 12)
    x = p.pick(["eggs", "cups of flour", "spoons of sugar", "apples", "cups of milk"])
    h = p.int(1, 15)
    t = e * n
    question = p.choose(
        (
            f"One cake needs {e} {x}. {p.name} bakes {n} cakes and already has {h} {x}. "
            f"How many more {x} does {p.he} need?"
        ),
        (
            f"A recipe uses {e} {x}. {p.name} wants to make it {n} times and has {h} {x}. "
            f"How many {x} must {p.he} still buy?"
        ),
    )
    if h >= t:
        return recipe(p)
    return question, [f"{p.He} needs {e} * {n} = {t} {x}.", f"{p.He} still needs {t} - {h} = {t - h} {x}."], t - h


@template
def days_total(p: Protagonist) -> Worked:
    a, d = p.int(4, 40), p.int(2, 20)
    x = p.pick(["cars", "tickets", "cups of tea", "loaves of bread", "books", "cakes"])
    i = p.int(0, 4)
    b, c = a + d, 2 * (a + d)
    question = p.choose(
        (
            f"On {DAYS[i]} a shop sold {a} {x}. On {DAYS[i + 1]} it sold {d} more than on {DAYS[i]}. "
            f"On {DAYS[i + 2]} it sold twice as many as on {DAYS[i + 1]}. How many {x} did it sell in the three days?"
        ),
        (
            f"{p.name} sold {a} {x} on {DAYS[i]}, {d} more than that on {DAYS[i + 1]}, and on {DAYS[i + 2]} twice as "
            f"many as on {DAYS[i + 1]}. How many {x} did {p.he} sell in total?"
        ),
    )
    steps = [
        f"On {DAYS[i + 1]}: {a} + {d} = {b}.",
        f"On {DAYS[i + 2]}: 2 * {b} = {c}.",
        f"The total is {a} + {b} + {c} = {a + b + c} {x}.",
    ]
    return question, steps, a + b + c


@template
def class_(p: Protagonist) -> Worked:
    c, s = p.int(2, 9), p.int(10, 30)
    t = c * s
    g = p.int(5, t - 5)
    question = p.choose(
        f"A school has {c} classes with {s} students in each. {g} of the students are girls. How many are boys?",
        (
            f"There are {c} classes of {s} students. "
            f"If {g} students walk to school and the others take the bus, how many take the bus?"
        ),
    )
    return question, [f"There are {c} * {s} = {t} students.", f"{t} - {g} = {t - g}."], t - g


@template
def trees(p: Protagonist) -> Worked:
    r, c, d, x = p.int(3, 12), p.int(3, 12), p.int(2, 20), p.pick(TREES)
    t = r * c
    if d >= t:
        return trees(p)
    question = p.choose(
        f"{p.name} plants {r} rows of {x} with {c} in each row. {d} of them die. How many {x} are left?",
        f"A farm has {r} rows of {c} {x}. {d} are cut down. How many {x} remain?",
    )
    return question, [f"There are {r} * {c} = {t} {x}.", f"{t} - {d} = {t - d} {x} are left."], t - d


@template
def legs(p: Protagonist) -> Worked:
    a, b = p.int(2, 20), p.int(2, 25)
    f, g = p.pick([("cows", "chickens"), ("horses", "ducks"), ("dogs", "parrots"), ("sheep", "geese")])
    u, v = 4 * a, 2 * b
    question = f"A farm has {a} {f} and {b} {g}. How many legs do the animals have in total?"
    steps = [
        f"The {f} have {a} * 4 = {u} legs.",
        f"The {g} have {b} * 2 = {v} legs.",
        f"In total there are {u} + {v} = {u + v} legs.",
    ]
    return question, steps, u + v


@template
def workers(p: Protagonist) -> Worked:
    n, r, h = p.int(2, 8), p.int(2, 9), p.int(2, 8)
    u, x = n * r, p.pick(["chairs", "tables", "toys", "shirts", "boxes", "bricks", "walls"])
    question = p.choose(
        f"{n} workers each make {r} {x} per hour. How many {x} do they make in {h} hours?",
        f"One machine makes {r} {x} an hour. How many {x} do {n} machines make in {h} hours?",
    )
    steps = [
        f"Together they make {n} * {r} = {u} {x} an hour.",
        f"In {h} hours they make {u} * {h} = {u * h} {x}.",
    ]
    return question, steps, u * h
