"""Problems about distance, area, time, temperature and averages."""

from __future__ import annotations

from moespeq_cli.demo.problems.protagonist import Protagonist, Worked, count_of, template


@template
def pages(p: Protagonist) -> Worked:
    r, d = p.int(5, 30), p.int(2, 9)
    t = r * d
    tot = t + p.int(5, 150)
    question = p.choose(
        f"A book has {tot} pages. {p.name} reads {r} pages a day for {d} days. How many pages are left to read?",
        (f"{p.name} reads {r} pages every day. After {d} days, how many pages of a {tot}-page book are still unread?"),
    )
    return question, [f"{p.He} reads {r} * {d} = {t} pages.", f"There are {tot} - {t} = {tot - t} pages left."], tot - t


@template
def two_legs(p: Protagonist) -> Worked:
    v, h, w, k = p.int(3, 30) * 2, p.int(2, 5), p.int(3, 30) * 2, p.int(2, 5)
    a, b = v * h, w * k
    m = p.pick(["train", "car", "bus", "truck"])
    question = p.choose(
        (
            f"A {m} travels at {v} miles per hour for {h} hours and then at {w} miles per hour for {k} hours. "
            "How many miles does it travel?"
        ),
        (
            f"{p.name} drives for {h} hours at {v} miles per hour and for {k} hours at {w} miles per hour. "
            f"How far does {p.he} drive in miles?"
        ),
    )
    steps = [
        f"The first part is {v} * {h} = {a} miles.",
        f"The second part is {w} * {k} = {b} miles.",
        f"The total is {a} + {b} = {a + b} miles.",
    ]
    return question, steps, a + b


@template
def perimeter(p: Protagonist) -> Worked:
    a, b = p.int(3, 60), p.int(3, 60)
    question = p.choose(
        (
            f"A rectangular garden is {a} meters long and {b} meters wide. "
            "How many meters of fence are needed to go around it?"
        ),
        f"What is the perimeter in meters of a rectangle with sides of {a} meters and {b} meters?",
    )
    return question, [f"{a} + {b} = {a + b}.", f"The perimeter is 2 * {a + b} = {2 * (a + b)} meters."], 2 * (a + b)


@template
def area_left(p: Protagonist) -> Worked:
    a, b = p.int(4, 15), p.int(4, 15)
    t = a * b
    c = p.int(3, t - 3)
    question = p.choose(
        (
            f"A floor is {a} feet long and {b} feet wide. A rug covers {c} square feet. "
            "How many square feet are not covered?"
        ),
        (
            f"{p.name}'s garden is {a} by {b} feet. {p.He} uses {c} square feet for vegetables. "
            "How many square feet are left?"
        ),
    )
    return question, [f"The area is {a} * {b} = {t} square feet.", f"{t} - {c} = {t - c} square feet are left."], t - c


@template
def minutes(p: Protagonist) -> Worked:
    h, m = p.int(1, 4), p.int(5, 55)
    t = h * 60
    w = p.pick(["movie", "trip", "concert", "lesson", "flight"])
    question = p.choose(
        f"A {w} lasts {count_of(h, 'hour')} and {m} minutes. How many minutes is that?",
        f"How many minutes long is a {w} of {count_of(h, 'hour')} and {m} minutes?",
    )
    steps = [
        f"{count_of(h, 'hour')} is {h} * 60 = {t} minutes.",
        f"The {w} lasts {t} + {m} = {t + m} minutes.",
    ]
    return question, steps, t + m


@template
def average(p: Protagonist) -> Worked:
    m = p.int(5, 60)
    a = p.int(max(1, m - 15), m + 15)
    b = p.int(max(1, m - 15), m + 15)
    c = 3 * m - a - b
    if c < 1:
        return average(p)
    verb, what = p.pick(
        [
            ("scored", "points in three games"),
            ("read", "pages on three days"),
            ("walked", "miles on three days"),
            ("wrote", "emails on three days"),
        ]
    )
    question = f"{p.name} {verb} {a}, {b} and {c} {what}. What is the average?"
    return question, [f"The sum is {a} + {b} + {c} = {3 * m}.", f"The average is {3 * m} / 3 = {m}."], m


@template
def tank(p: Protagonist) -> Worked:
    r = p.int(5, 30)
    k, m = p.int(1, r - 3), p.int(2, 12)
    n = r - k
    question = p.choose(
        (
            f"A tank is filled with {r} liters of water per minute and leaks {count_of(k, 'liter')} per minute. "
            f"How many liters are in it after {m} minutes?"
        ),
        (
            f"Water flows into an empty tank at {r} liters a minute and out at {count_of(k, 'liter')} a minute. "
            f"How much water is in the tank after {m} minutes?"
        ),
    )
    steps = [
        f"The tank gains {r} - {k} = {n} liters a minute.",
        f"After {m} minutes it holds {n} * {m} = {n * m} liters.",
    ]
    return question, steps, n * m


@template
def laps(p: Protagonist) -> Worked:
    n, e, d = p.int(2, 9), p.int(2, 9), p.int(2, 7)
    u = n * e
    question = p.choose(
        f"{p.name} runs {n} laps a day and each lap is {e} miles. How many miles does {p.he} run in {d} days?",
        f"Each lap is {e} miles. {p.name} rides {n} laps every day for {d} days. How many miles does {p.he} ride?",
    )
    steps = [
        f"{p.He} covers {n} * {e} = {u} miles a day.",
        f"In {d} days that is {u} * {d} = {u * d} miles.",
    ]
    return question, steps, u * d


@template
def temperature(p: Protagonist) -> Worked:
    a, b, c = p.int(40, 80), p.int(2, 20), p.int(2, 30)
    question = p.choose(
        (
            f"In the morning it is {a} degrees. By noon it gets {b} degrees warmer and by night {c} degrees colder. "
            "What is the temperature at night?"
        ),
        f"The temperature was {a} degrees. It rose by {b} degrees and then fell by {c} degrees. What is it now?",
    )
    return question, [f"{a} + {b} = {a + b} degrees.", f"{a + b} - {c} = {a + b - c} degrees."], a + b - c


@template
def week_weekend(p: Protagonist) -> Worked:
    a, b = p.int(2, 15), p.int(2, 20)
    u, v = 5 * a, 2 * b
    x, vb = p.pick([("pages", "reads"), ("minutes", "jogs"), ("cups", "sells"), ("emails", "writes")])
    question = (
        f"{p.name} {vb} {a} {x} on each of the 5 weekdays and {b} {x} on each of the 2 weekend days. "
        f"How many {x} is that in a week?"
    )
    steps = [
        f"On weekdays: 5 * {a} = {u}.",
        f"On the weekend: 2 * {b} = {v}.",
        f"In total: {u} + {v} = {u + v} {x}.",
    ]
    return question, steps, u + v


@template
def age(p: Protagonist) -> Worked:
    a, d, n, o = p.int(5, 40), p.int(2, 15), p.int(2, 20), p.other()
    question = p.choose(
        f"{p.name} is {a} years old. {o} is {d} years older. How old will {o} be in {n} years?",
        f"{o} is {d} years older than {p.name}, who is {a}. What will {o}'s age be after {n} years?",
    )
    steps = [
        f"{o} is {a} + {d} = {a + d} years old.",
        f"In {n} years {o} will be {a + d} + {n} = {a + d + n}.",
    ]
    return question, steps, a + d + n
