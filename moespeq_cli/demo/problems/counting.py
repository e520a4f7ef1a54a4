"""Problems about counting, sharing and packing things."""

from __future__ import annotations

from moespeq_cli.demo.problems.protagonist import Protagonist, Worked, count_of, template
from moespeq_cli.demo.problems.words import KIN, PACKS, THINGS


@template
def buy_more(p: Protagonist) -> Worked:
    a, b, x = p.int(3, 150), p.int(3, 90), p.pick(THINGS)
    question = p.choose(
        f"{p.name} has {a} {x}. {p.He} buys {b} more. How many {x} does {p.he} have now?",
        f"{p.name} had {a} {x} and then found {b} more. How many {x} does {p.name} have in total?",
        f"There are {a} {x} on the table. {p.name} puts {b} more {x} on it. How many {x} are on the table?",
    )
    return question, [f"{a} + {b} = {a + b} {x}."], a + b


@template
def give_away(p: Protagonist) -> Worked:
    a = p.int(15, 180)
    b, x, k = p.int(3, a - 2), p.pick(THINGS), p.pick(KIN)
    question = p.choose(
        f"{p.name} has {a} {x}. {p.He} gives {b} of them to {p.his} {k}. How many {x} are left?",
        f"{p.name} collected {a} {x} but lost {b} of them. How many {x} does {p.he} still have?",
        f"A shop had {a} {x} in the morning. By evening {b} of them were sold. How many {x} remain?",
    )
    return question, [f"{a} - {b} = {a - b} {x} are left."], a - b


@template
def groups(p: Protagonist) -> Worked:
    n, e, x, k = p.int(2, 12), p.int(2, 25), p.pick(THINGS), p.pick(PACKS)
    question = p.choose(
        f"{p.name} buys {n} {k} of {x}. There are {e} {x} in each. How many {x} does {p.he} buy?",
        f"There are {n} {k} with {e} {x} in each of them. How many {x} are there altogether?",
    )
    return question, [f"{n} * {e} = {n * e} {x}."], n * e


@template
def share(p: Protagonist) -> Worked:
    n, e, x = p.int(2, 12), p.int(2, 20), p.pick(THINGS)
    question = p.choose(
        f"{p.name} shares {n * e} {x} equally among {n} children. How many {x} does each child get?",
        f"{n * e} {x} are packed equally into {n} {p.pick(PACKS)}. How many {x} are in each?",
    )
    return question, [f"{n * e} / {n} = {e} {x} each."], e


@template
def packs_plus(p: Protagonist) -> Worked:
    a, n, e, x, k = p.int(3, 90), p.int(2, 9), p.int(2, 15), p.pick(THINGS), p.pick(PACKS)
    t = n * e
    question = p.choose(
        f"{p.name} has {a} {x}. {p.He} buys {n} {k} with {e} {x} each. How many {x} does {p.he} have now?",
        (
            f"{p.name} bought {n} {k} of {x}, each with {e} {x}. {p.He} already had {a} {x} at home. "
            f"How many {x} does {p.he} have in all?"
        ),
    )
    return question, [f"{p.He} buys {n} * {e} = {t} {x}.", f"In total {p.he} has {a} + {t} = {a + t} {x}."], a + t


@template
def times_as_many(p: Protagonist) -> Worked:
    a, k, x, o = p.int(3, 30), p.int(2, 5), p.pick(THINGS), p.other()
    word = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}[k]
    b = a * k
    question = p.choose(
        f"{p.name} has {a} {x}. {o} has {word} as many. How many {x} do they have together?",
        f"{o} has {word} as many {x} as {p.name}, who has {a} {x}. How many {x} do they have in total?",
    )
    return question, [f"{o} has {k} * {a} = {b} {x}.", f"Together they have {a} + {b} = {a + b} {x}."], a + b


@template
def more_than(p: Protagonist) -> Worked:
    a, d, x, o = p.int(5, 90), p.int(2, 40), p.pick(THINGS), p.other()
    b = a + d
    question = p.choose(
        f"{p.name} has {a} {x}. {o} has {d} more {x} than {p.name}. How many {x} do they have together?",
        f"{o} picked {d} more {x} than {p.name}. If {p.name} picked {a} {x}, how many {x} did they pick in total?",
    )
    return question, [f"{o} has {a} + {d} = {b} {x}.", f"Together they have {a} + {b} = {a + b} {x}."], a + b


@template
def fewer_than(p: Protagonist) -> Worked:
    a, x, o = p.int(20, 90), p.pick(THINGS), p.other()
    d = p.int(2, a - 5)
    b = a - d
    question = p.choose(
        f"{p.name} has {a} {x}. {o} has {d} fewer {x} than {p.name}. How many {x} do they have together?",
        f"{o} made {d} fewer {x} than {p.name}. {p.name} made {a} {x}. How many {x} did they make altogether?",
    )
    return question, [f"{o} has {a} - {d} = {b} {x}.", f"Together they have {a} + {b} = {a + b} {x}."], a + b


@template
def half_then(p: Protagonist) -> Worked:
    h = p.int(6, 60)
    a, x, k = 2 * h, p.pick(THINGS), p.pick(KIN)
    b = p.int(2, h - 2)
    question = p.choose(
        (
            f"{p.name} has {a} {x}. {p.He} gives half of them to {p.his} {k} and then loses {b}. "
            f"How many {x} does {p.he} have left?"
        ),
        f"{p.name} had {a} {x}. Half of them were sold and {b} more were eaten. How many {x} are left?",
    )
    return question, [f"Half of {a} is {a} / 2 = {h} {x}.", f"Then {h} - {b} = {h - b} {x} are left."], h - b


@template
def dozen(p: Protagonist) -> Worked:
    n = p.int(2, 10)
    t = n * 12
    u, x = p.int(3, t - 3), p.pick(["eggs", "donuts", "roses", "muffins", "cupcakes", "rolls"])
    question = p.choose(
        f"{p.name} buys {n} dozen {x}. {p.He} uses {u} of them. How many {x} are left?",
        f"A bakery made {n} dozen {x} and sold {u}. How many {x} were not sold?",
    )
    return question, [f"{n} dozen is {n} * 12 = {t} {x}.", f"{t} - {u} = {t - u} {x} are left."], t - u


@template
def boxes_needed(p: Protagonist) -> Worked:
    e, n, x = p.int(3, 12), p.int(2, 15), p.pick(THINGS)
    t = e * n
    a = p.int(1, t - 1)
    question = p.choose(
        (
            f"{p.name} has {a} {x} and {p.his} {p.pick(KIN)} has {t - a}. They put all of them into boxes of {e}. "
            "How many boxes do they need?"
        ),
        (f"A farm has {a} red {x} and {t - a} green {x}. They are packed in boxes of {e}. How many boxes are needed?"),
    )
    return question, [f"There are {a} + {t - a} = {t} {x}.", f"They need {t} / {e} = {count_of(n, 'box', 'boxes')}."], n


@template
def share_after(p: Protagonist) -> Worked:
    f, e, u, x = p.int(2, 9), p.int(2, 15), p.int(2, 30), p.pick(THINGS)
    t = f * e
    question = p.choose(
        (
            f"{p.name} has {t + u} {x}. {p.He} keeps {u} and shares the rest equally among {f} friends. "
            f"How many {x} does each friend get?"
        ),
        f"{f} friends share {t + u} {x} equally after {u} of them are thrown away. How many {x} does each get?",
    )
    return question, [f"{t + u} - {u} = {t} {x} are shared.", f"Each gets {t} / {f} = {e} {x}."], e


@template
def fraction(p: Protagonist) -> Worked:
    k = p.pick([2, 3, 4, 5])
    w = {2: "half", 3: "one third", 4: "a quarter", 5: "one fifth"}[k]
    e, x = p.int(3, 40), p.pick(THINGS)
    t = k * e
    question = p.choose(
        f"{p.name} has {t} {x}. {p.He} uses {w} of them. How many {x} are left?",
        f"There were {t} {x} in a shop and {w} of them were sold. How many {x} are still in the shop?",
    )
    return question, [f"{w.capitalize()} of {t} is {t} / {k} = {e} {x}.", f"{t} - {e} = {t - e} {x} are left."], t - e


@template
def two_packs(p: Protagonist) -> Worked:
    a, b, c, d, x = p.int(2, 8), p.int(2, 12), p.int(2, 8), p.int(2, 12), p.pick(THINGS)
    u, v = a * b, c * d
    k, m = p.rng.sample(PACKS, 2)
    question = p.choose(
        (
            f"{p.name} has {a} {k} with {b} {x} each and {c} {m} with {d} {x} each. "
            f"How many {x} does {p.he} have in all?"
        ),
        f"A store gets {a} {k} of {b} {x} and {c} {m} of {d} {x}. How many {x} does it get?",
    )
    steps = [
        f"The {k} hold {a} * {b} = {u} {x}.",
        f"The {m} hold {c} * {d} = {v} {x}.",
        f"The total is {u} + {v} = {u + v} {x}.",
    ]
    return question, steps, u + v


@template
def stickers(p: Protagonist) -> Worked:
    n, e, g, k = p.int(3, 12), p.int(3, 12), p.int(2, 5), p.int(2, 10)
    t, u = n * e, g * k
    if u >= t:
        return stickers(p)
    x = p.pick(["stickers", "photos", "stamps", "cards"])
    question = p.choose(
        (
            f"{p.name}'s album has {n} pages with {e} {x} on each page. {p.He} gives {k} {x} to each of {g} friends. "
            f"How many {x} are left?"
        ),
        (
            f"{p.name} has {n} pages of {e} {x}. {p.He} hands out {k} {x} to each of {p.his} {g} friends. "
            f"How many {x} does {p.he} still have?"
        ),
    )
    steps = [
        f"{p.He} has {n} * {e} = {t} {x}.",
        f"{p.He} gives away {g} * {k} = {u} {x}.",
        f"{t} - {u} = {t - u} {x} are left.",
    ]
    return question, steps, t - u


@template
def leftover(p: Protagonist) -> Worked:
    n, e, r, x = p.int(3, 12), p.int(2, 9), p.int(1, 20), p.pick(THINGS)
    t = n * e
    question = p.choose(
        f"A teacher has {t + r} {x}. She gives {e} {x} to each of {n} students. How many {x} are left over?",
        f"{p.name} has {t + r} {x} and gives {e} to each of {n} guests. How many {x} does {p.he} keep?",
    )
    return question, [f"{n} * {e} = {t} {x} are given away.", f"{t + r} - {t} = {r} {x} are left."], r


@template
def three_people(p: Protagonist) -> Worked:
    a, d, x, o = p.int(3, 30), p.int(2, 15), p.pick(THINGS), p.other()
    r = p.other()
    while r == o:
        r = p.other()
    b = 2 * a
    c = b + d
    question = (
        f"{p.name} has {a} {x}. {o} has twice as many as {p.name}. {r} has {d} more than {o}. "
        f"How many {x} does {r} have?"
    )
    return question, [f"{o} has 2 * {a} = {b} {x}.", f"{r} has {b} + {d} = {c} {x}."], c


@template
def ratio_left(p: Protagonist) -> Worked:
    k, e, s = p.int(2, 6), p.int(3, 20), p.int(2, 30)
    t = k * e
    x = p.pick(THINGS)
    question = (
        f"{p.name} puts {t} {x} equally into {k} boxes. {p.He} then adds {s} {x} to one of the boxes. "
        f"How many {x} are in that box?"
    )
    return question, [f"Each box gets {t} / {k} = {e} {x}.", f"That box has {e} + {s} = {e + s} {x}."], e + s
