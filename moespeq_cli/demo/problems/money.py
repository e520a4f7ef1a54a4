"""Problems about prices, wages, savings and bills."""

from __future__ import annotations

from moespeq_cli.demo.problems.protagonist import Protagonist, Worked, count_of, template
from moespeq_cli.demo.problems.words import GOODS, WORK


@template
def change(p: Protagonist) -> Worked:
    n, e, g = p.int(2, 9), p.int(2, 15), p.pick(GOODS)
    t = n * e
    bill = p.pick([b for b in (20, 50, 100, 150, 200) if b > t])
    question = p.choose(
        f"A {g} costs ${e}. {p.name} buys {n} of them and pays with ${bill}. How much change does {p.he} get?",
        f"{p.name} had ${bill}. {p.He} bought {n} {g}s for ${e} each. How much money does {p.he} have left?",
    )
    return question, [f"The {g}s cost {n} * {e} = ${t}.", f"{p.He} has {bill} - {t} = ${bill - t} left."], bill - t


@template
def two_goods(p: Protagonist) -> Worked:
    g, h = p.rng.sample(GOODS, 2)
    a, c, b, d = p.int(2, 8), p.int(2, 12), p.int(2, 8), p.int(2, 12)
    u, v = a * c, b * d
    question = p.choose(
        f"A {g} costs ${c} and a {h} costs ${d}. {p.name} buys {a} {g}s and {b} {h}s. How much does {p.he} pay?",
        f"{p.name} buys {a} {g}s at ${c} each and {b} {h}s at ${d} each. How much does {p.he} spend in total?",
    )
    steps = [
        f"The {g}s cost {a} * {c} = ${u}.",
        f"The {h}s cost {b} * {d} = ${v}.",
        f"The total is {u} + {v} = ${u + v}.",
    ]
    return question, steps, u + v


@template
def wages(p: Protagonist) -> Worked:
    r, h, b, w = p.int(5, 20), p.int(2, 9), p.int(2, 10) * 5, p.pick(WORK)
    t = r * h
    question = p.choose(
        (
            f"{p.name} {w} and earns ${r} per hour. {p.He} works {h} hours and gets a bonus of ${b}. "
            f"How much does {p.he} earn?"
        ),
        (
            f"{p.name} {w} for ${r} an hour. Last week {p.he} worked {h} hours and also received ${b} in tips. "
            f"How much money did {p.he} make?"
        ),
    )
    steps = [
        f"{p.He} earns {r} * {h} = ${t} for the hours.",
        f"With the extra money {p.he} makes {t} + {b} = ${t + b}.",
    ]
    return question, steps, t + b


@template
def savings(p: Protagonist) -> Worked:
    per, wk, have = p.int(3, 20), p.int(2, 12), p.int(5, 80)
    g = p.pick(["bike", "guitar", "game console", "phone", "tent", "skateboard"])
    need = per * wk
    question = p.choose(
        (
            f"{p.name} wants to buy a {g} that costs ${have + need}. {p.He} has ${have} and saves ${per} each week. "
            f"How many weeks does {p.he} need to save?"
        ),
        (
            f"A {g} costs ${have + need}. {p.name} already has ${have}. "
            f"If {p.he} saves ${per} per week, in how many weeks can {p.he} buy it?"
        ),
    )
    steps = [
        f"{p.He} still needs {have + need} - {have} = ${need}.",
        f"That takes {need} / {per} = {count_of(wk, 'week')}.",
    ]
    return question, steps, wk


@template
def percent_off(p: Protagonist) -> Worked:
    pc = p.pick([10, 20, 25, 50])
    base = p.int(1, 12) * {10: 10, 20: 5, 25: 4, 50: 2}[pc] * p.pick([1, 1, 2])
    d, g = base * pc // 100, p.pick(GOODS)
    question = p.choose(
        f"A {g} costs ${base}. It is on sale for {pc}% off. What is the sale price?",
        f"{p.name} buys a {g} with a price of ${base} and gets a {pc}% discount. How much does {p.he} pay?",
    )
    steps = [
        f"The discount is {base} * {pc} / 100 = ${d}.",
        f"The price is {base} - {d} = ${base - d}.",
    ]
    return question, steps, base - d


@template
def eggs(p: Protagonist) -> Worked:
    n, e, d, pr = p.int(5, 20), p.int(1, 4), p.int(2, 7), p.int(2, 3)
    left, day = n - e, (n - e) * pr
    question = p.choose(
        (
            f"{p.name}'s hens lay {n} eggs a day. {p.He} eats {e} every day and sells the rest for ${pr} each. "
            f"How much money does {p.he} make in {d} days?"
        ),
        (
            f"Each day {p.name} collects {n} eggs, keeps {e} and sells the others at ${pr} per egg. "
            f"How much does {p.he} earn in {d} days?"
        ),
    )
    steps = [
        f"{p.He} sells {n} - {e} = {left} eggs a day.",
        f"{p.He} makes {left} * {pr} = ${day} a day.",
        f"In {d} days {p.he} makes {day} * {d} = ${day * d}.",
    ]
    return question, steps, day * d


@template
def coins(p: Protagonist) -> Worked:
    a, b = p.int(2, 20), p.int(2, 20)
    u, v = 5 * a, 10 * b
    question = p.choose(
        f"{p.name} has {a} nickels and {b} dimes. How many cents does {p.he} have?",
        f"A jar holds {a} nickels and {b} dimes. What is the value of the coins in cents?",
    )
    steps = [
        f"The nickels are worth {a} * 5 = {u} cents.",
        f"The dimes are worth {b} * 10 = {v} cents.",
        f"The total is {u} + {v} = {u + v} cents.",
    ]
    return question, steps, u + v


@template
def two_earn(p: Protagonist) -> Worked:
    o = p.other()
    a, h, b, k = p.int(4, 15), p.int(2, 8), p.int(4, 15), p.int(2, 8)
    u, v = a * h, b * k
    question = p.choose(
        (
            f"{p.name} earns ${a} an hour and {o} earns ${b} an hour. "
            f"{p.name} works {h} hours and {o} works {k} hours. How much do they earn together?"
        ),
        (
            f"{p.name} works {h} hours for ${a} per hour. {o} works {k} hours for ${b} per hour. "
            "What is their total pay?"
        ),
    )
    steps = [
        f"{p.name} earns {a} * {h} = ${u}.",
        f"{o} earns {b} * {k} = ${v}.",
        f"Together they earn {u} + {v} = ${u + v}.",
    ]
    return question, steps, u + v


@template
def subscription(p: Protagonist) -> Worked:
    m, n, f = p.int(3, 20), p.int(2, 12), p.int(2, 10) * 5
    t = m * n
    s = p.pick(["gym", "music club", "swimming pool", "tennis club", "library"])
    question = p.choose(
        f"A {s} costs ${f} to join and ${m} per month. How much does {p.name} pay for {n} months?",
        (
            f"{p.name} joins a {s}. {p.He} pays a fee of ${f} and then ${m} each month. "
            f"How much has {p.he} paid after {n} months?"
        ),
    )
    return question, [f"The months cost {m} * {n} = ${t}.", f"With the fee it is {t} + {f} = ${t + f}."], t + f


@template
def spend_left(p: Protagonist) -> Worked:
    a, b, c = p.int(60, 200), p.int(5, 25), p.int(5, 25)
    g, h = p.rng.sample(GOODS, 2)
    question = p.choose(
        f"{p.name} has ${a}. {p.He} buys a {g} for ${b} and a {h} for ${c}. How much money is left?",
        (
            f"{p.name} went shopping with ${a} and bought a {g} for ${b} and a {h} for ${c}. "
            f"How many dollars does {p.he} have now?"
        ),
    )
    steps = [
        f"{p.He} spends {b} + {c} = ${b + c}.",
        f"{p.He} has {a} - {b + c} = ${a - b - c} left.",
    ]
    return question, steps, a - b - c


@template
def profit(p: Protagonist) -> Worked:
    n, c, m = p.int(3, 12), p.int(2, 10), p.int(1, 8)
    s = c + m
    g = p.pick(GOODS)
    question = p.choose(
        f"{p.name} buys {n} {g}s for ${c} each and sells them for ${s} each. How much profit does {p.he} make?",
        f"A shop buys a {g} for ${c} and sells it for ${s}. What is the profit in dollars on {n} of them?",
    )
    return question, [f"The profit on one is {s} - {c} = ${m}.", f"The profit on all is {m} * {n} = ${m * n}."], m * n


@template
def split_bill(p: Protagonist) -> Worked:
    n, e = p.int(2, 9), p.int(4, 20)
    tip = p.int(2, 20)
    t = n * e
    if tip >= t:
        return split_bill(p)
    question = p.choose(
        (
            f"{n} friends eat dinner. The food costs ${t - tip} and the tip is ${tip}. They split the bill equally. "
            "How much does each pay?"
        ),
        (
            f"A dinner for {n} people costs ${t - tip} plus a tip of ${tip}. "
            "If everybody pays the same, how much is it per person?"
        ),
    )
    return question, [f"The bill is {t - tip} + {tip} = ${t}.", f"Each pays {t} / {n} = ${e}."], e
