# SPDX-License-Identifier: Apache-2.0
"""Texts and tasks that ouro-small is trained and measured on, as bytes with a weight for each. Standard library only.

A sequence is (ids, weights): ids[0] is BOS, the rest are bytes; weights[i] says how much predicting ids[i] counts (tenths; 0: not at all).
Answers weigh at least ANSWER, prose weighs TEXT, everything that cannot be known (random tables, digits, questions) weighs nothing.
All draws come from the random.Random that is passed in, so a seed names its sequences on every machine.
"""
import lzma, pathlib, random

BOS = 256
TEXT, ANSWER = 10, 40  # weights in tenths: a byte of prose, an answer's byte
HOPS = range(1, 7)  # chain: how often the table is followed
SWAPS = range(1, 9)  # swap: how many pairs of places change their content
TERMS = range(2, 17)  # sum: how many digits are added
KINDS = ("text", "needle", "kv", "copy", "sum", "chain", "swap")
NAMES = "abel bram cora dale edda finn gwen hale iris joel kira lars mona nils olga pete rhea sven tove ursa vera wade yuri zora".split()
LETTERS, DIGITS = "abcdefghijklmnopqrstuvwxyz", "0123456789"
CORPORA = {"kjv": 0.6, "jargon": 0.3, "devil": 0.1}  # share of each in drawn passages


def load_training(folder):
    return {name: lzma.open(pathlib.Path(folder) / f"{name}.train.txt.xz").read() for name in CORPORA}


def load_held_out(folder):
    return {name: (pathlib.Path(folder) / f"{name}.held.txt").read_bytes() for name in CORPORA}


def passage(r, length, texts):
    text = texts[r.choices(list(CORPORA), list(CORPORA.values()))[0]]
    length = min(length, len(text) - 1)
    start = r.randrange(len(text) - length)
    return text[start : start + length]


def word(r, alphabet, length):
    return "".join(r.choices(alphabet, k=length))


# ---- tasks: each returns a list of (text, weight) --------------------------------------------------------------------------------------

def needle(r, room, texts, count=None):
    """Codes hidden in prose, asked in another order; `room` is the length of the whole."""
    count = count or r.randrange(1, 7)
    names = r.sample(NAMES, count)
    codes = {name: word(r, DIGITS, 5) for name in names}
    gap = max(16, (room - 70 * count) // (count + 1))
    parts = []
    for name in names:
        parts += [(passage(r, r.randrange(gap // 2, gap + 1), texts), 0), (f"\n[The code of {name} is ", 0), (codes[name], 0), ("]\n", 0)]
    parts.append((passage(r, r.randrange(gap // 2, gap + 1), texts), 0))
    for name in r.sample(names, count):
        parts += [(f"\n[The code of {name}? ", 0), (codes[name], 2 * ANSWER), ("]\n", 2)]
    return parts


def kv(r, count=None):
    """A table of keys and values, then look-ups."""
    count = count or r.randrange(4, 33)
    keys = [word(r, LETTERS + DIGITS, 3) for _ in range(count)]
    table = dict(zip(keys, (word(r, DIGITS, 3) for _ in keys)))
    parts = [("\n" + "".join(f"{key}:{value}\n" for key, value in table.items()), 0)]
    for key in r.sample(list(table), max(1, len(table) // 2)):
        parts += [(f"?{key}:", 0), (table[key], ANSWER), ("\n", 2)]
    return parts


def copy(r):
    text = word(r, LETTERS + DIGITS, r.randrange(16, 129))
    return [(f"\n<{text}><{text[:2]}", 0), (text[2:], TEXT), (">\n", 2)]


def sums(r, terms=None):
    """Sums of digits, modulo 100."""
    parts = [("\n", 0)]
    for _ in range(4):
        digits = r.choices(range(10), k=terms or r.choice(TERMS))
        parts += [("+".join(map(str, digits)) + "=", 0), (f"{sum(digits) % 100:02d}", ANSWER), (";", 2)]
    return parts


def chain(r, hops=None):
    """A table of letters that forms one cycle; a question says how often to follow it. `3a=d` in `a>b b>c c>d`."""
    count = r.randrange(8, 27)
    cycle = r.sample(LETTERS, count)
    place = {letter: i for i, letter in enumerate(cycle)}
    table = [f"{letter}>{cycle[(i + 1) % count]}" for i, letter in enumerate(cycle)]
    r.shuffle(table)
    parts = [("\n" + " ".join(table) + "\n", 0)]
    questions = {(hops or r.choice(HOPS), r.choice(cycle)) for _ in range(16)}
    for steps, start in r.sample(sorted(questions), len(questions)):
        parts += [(f"{steps}{start}=", 0), (cycle[(place[start] + steps) % count], 6 * TEXT), (";", 2)]
    return parts


def swap(r, swaps=None):
    """Five letters in five places, pairs of places that change their content one after the other, then what lies in three of the places."""
    row = r.sample(LETTERS, 5)
    parts = [("\n" + "".join(row) + " ", 0)]
    for _ in range(swaps or r.choice(SWAPS)):
        a, b = r.sample(range(5), 2)
        row[a], row[b] = row[b], row[a]
        parts.append((f"{a + 1}{b + 1} ", 0))
    for place in r.sample(range(5), 3):
        parts += [(f"?{place + 1}=", 0), (row[place], 6 * TEXT)]
    return parts + [("\n", 0)]


# ---- sequences --------------------------------------------------------------------------------------------------------------------------

def join(parts, length):
    """(ids, weights) of `length` + 1 entries: BOS, then the parts, cut or filled with line feeds of no weight."""
    data, weights = bytearray(), bytearray()
    for text, weight in parts:
        text = text.encode() if isinstance(text, str) else text
        data += text
        weights += bytes([weight]) * len(text)
    missing = max(0, length - len(data))
    data += b"\n" * missing
    weights += bytes(missing)
    return [BOS, *data[:length]], [0, *weights[:length]]


def size(parts):
    return sum(len(text) for text, _ in parts)


def task(r, kind, length, texts, level=None):
    """A sequence of one kind. `level`: needles, pairs, terms, hops or swaps; drawn anew for every item where it is None."""
    if kind == "text":
        return join([(passage(r, length, texts), TEXT)], length)
    parts = []
    while size(parts) < length:
        room = length - size(parts)
        if kind == "needle":
            parts += needle(r, min(room, length) - 8, texts, level)
        else:
            parts += {"kv": kv, "sum": sums, "chain": chain, "swap": swap}[kind](r, level) if kind != "copy" else copy(r)
    return join(parts, length)


def training_sequence(r, length, texts, text_share):
    """Prose, needles in prose, or a mixture of short tasks with some prose between them."""
    kind = r.random()
    if kind < text_share:
        return task(r, "text", length, texts)
    if kind < text_share + 0.14:
        return join(needle(r, length - 8, texts), length)
    parts, filled = [], 0
    while filled < length:
        item = r.choices(("chain", "swap", "sum", "kv", "copy", "needle"), (0.38, 0.28, 0.14, 0.08, 0.06, 0.06))[0]
        new = needle(r, r.randrange(150, 700), texts) if item == "needle" else {"chain": chain, "swap": swap, "sum": sums, "kv": kv, "copy": copy}[item](r)
        if r.random() < 0.1:
            new.append((passage(r, r.randrange(16, 160), texts), TEXT))
        parts += new
        filled += size(new)
    return join(parts, length)


def held_out_blocks(text, length):
    """The whole text in consecutive blocks of `length` bytes, the last incomplete one left out."""
    return [join([(text[i : i + length], TEXT)], length) for i in range(0, len(text) - length + 1, length)]


if __name__ == "__main__":
    import sys
    here = pathlib.Path(__file__).resolve().parent
    generator = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 1)
    ids, weights = task(generator, sys.argv[1], 600, load_held_out(here.parent.parent / "data" / "corpus"))
    print(bytes(ids[1:]).decode(errors="replace"))
