#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the traces of this folder from the held-out text and seeded task generators.

    make_traces.py [NAME ...]      writes traces/NAME.h5 (all when no name is given); published traces are never overwritten
    make_traces.py --check         makes every trace anew in memory and compares it with the published file

Needs Python 3 with h5py and numpy. The same seed gives the same trace everywhere: the generator is spelled out below rather than taken
from a library whose stream may change.
"""
import argparse
import pathlib
import sys

import h5py
import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
BOS, VOCAB = 256, 264
NO_EOS = -1
NAMES = ("abel bram cora dale edda finn gwen hale iris joel kira lars mona nils olga pete rhea sven tove ursa vera wade yuri zora").split()
ALPHANUMERIC = "abcdefghijklmnopqrstuvwxyz0123456789"


class Generator:
    """splitmix64, seeded by the trace's name (FNV-1a)."""

    MASK = (1 << 64) - 1

    def __init__(self, name):
        self.state = 0xCBF29CE484222325
        for byte in name.encode():
            self.state = ((self.state ^ byte) * 0x100000001B3) & self.MASK

    def next(self):
        self.state = (self.state + 0x9E3779B97F4A7C15) & self.MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & self.MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & self.MASK
        return z ^ (z >> 31)

    def between(self, low, high):
        """An integer in low..high, both included. The modulo's bias is of no interest here."""
        return low + self.next() % (high - low + 1)

    def permutation(self, count):
        order = list(range(count))
        for i in range(count - 1, 0, -1):
            j = self.between(0, i)
            order[i], order[j] = order[j], order[i]
        return order

    def characters(self, alphabet, count):
        return "".join(alphabet[self.between(0, len(alphabet) - 1)] for _ in range(count))


def corpus(name):
    return (HERE / "corpus" / f"{name}.held.txt").read_bytes()


def passage(generator, length, source=None):
    """`length` consecutive bytes of the held-out text; the source is drawn 6:3:1 when not given."""
    source = source or ("kjv", "kjv", "kjv", "kjv", "kjv", "kjv", "jargon", "jargon", "jargon", "devil")[generator.between(0, 9)]
    text = corpus(source)
    begin = generator.between(0, len(text) - length)
    return text[begin:begin + length]


class Pieces:
    """Bytes with a flag each: is it part of an answer?"""

    def __init__(self):
        self.ids, self.scored = [], []

    def put(self, text, scored=False):
        data = text if isinstance(text, bytes) else text.encode()
        self.ids += list(data)
        self.scored += [int(scored)] * len(data)
        return self


def request(prompt, forced=None, max_new_tokens=None, task="text", **more):
    """A request whose prompt begins with BOS unless bos=False."""
    ids = ([BOS] if more.pop("bos", True) else []) + list(prompt)
    return dict(prompt=ids, forced=None if forced is None else list(forced), task=task,
                max_new_tokens=len(forced) if forced is not None else max_new_tokens, **more)


def continued(generator, prompt_length, forced_length, source=None, **more):
    """Prose: a prompt of prompt_length tokens (BOS included) and its true continuation as forced tokens."""
    text = passage(generator, prompt_length - 1 + forced_length, source)
    return request(text[:prompt_length - 1], text[prompt_length - 1:], **more)


def asked(question_free, questions, task):
    """Prompt without answers, then questions and answers as forced tokens with their answer mask."""
    return request(question_free.ids, questions.ids, task=task, answer_mask=questions.scored)


def needle(generator, length, needles):
    """Names with five-digit codes scattered in prose, then a question for each in another order."""
    names = [NAMES[i] for i in generator.permutation(len(NAMES))[:needles]]
    codes = [generator.characters("0123456789", 5) for _ in names]
    sentences = [f"\n[The code of {name} is {code}]\n" for name, code in zip(names, codes)]
    prose = length - 1 - sum(map(len, sentences))
    cuts = sorted(generator.between(0, prose) for _ in range(needles))
    prompt, questions, at = Pieces(), Pieces(), 0
    for cut, sentence in zip(cuts, sentences):
        prompt.put(passage(generator, cut - at) if cut > at else "").put(sentence)
        at = cut
    prompt.put(passage(generator, prose - at) if prose > at else "")
    for i in generator.permutation(needles):
        questions.put(f"\n[The code of {names[i]}? ").put(codes[i], scored=True).put("]\n")
    return asked(prompt, questions, "needle")


def copy(generator, length):
    """A random string and the beginning of its copy; the rest is the answer."""
    text = generator.characters(ALPHANUMERIC, length)
    return asked(Pieces().put(f"\n<{text}><{text[:2]}"), Pieces().put(text[2:], scored=True).put(">\n"), "copy")


def sums(generator, solved, unsolved):
    """Sums of two to six digits, two-digit results (modulo 100); `solved` of them in the prompt."""
    def one(pieces):
        digits = [generator.between(0, 9) for _ in range(generator.between(2, 6))]
        pieces.put("+".join(map(str, digits)) + "=").put(f"{sum(digits) % 100:02d}", scored=True).put(";")

    prompt, questions = Pieces().put("\n"), Pieces()
    for _ in range(solved):
        one(prompt)
    for _ in range(unsolved):
        one(questions)
    return asked(prompt, questions, "sum")


def key_values(generator, entries, look_ups):
    """A table of keys and values, and some of them asked for in another order."""
    keys = []
    while len(keys) < entries:
        key = generator.characters(ALPHANUMERIC, 3)
        if key not in keys:
            keys.append(key)
    values = [generator.characters("0123456789", 3) for _ in keys]
    questions = Pieces()
    for i in generator.permutation(entries)[:look_ups]:
        questions.put(f"?{keys[i]}:").put(values[i], scored=True).put("\n")
    return "\n" + "".join(f"{key}:{value}\n" for key, value in zip(keys, values)), questions


def answered_freely(made, max_new_tokens):
    """A task whose prompt ends where the first answer begins; the model answers, and goes on as it likes."""
    prompt = bytes(made["prompt"][1:]) + bytes(made["forced"][:made["answer_mask"].index(1)])
    return request(prompt, max_new_tokens=max_new_tokens, task=made["task"])


# ---- the traces: name -> (description, requests, events) ----------------------------------------------------------------------

def boundary_short(g):
    yield request(b"", passage(g, 2))
    yield continued(g, 7, 2)
    yield continued(g, 63, 2)
    yield continued(g, 64, 2)
    yield continued(g, 65, 2)


def boundary_long(g):
    for length in (127, 128, 129, 191, 192):
        yield continued(g, length, 2)


def four(g):
    for length, arrival in ((9, 0), (70, 0), (130, 1), (260, 2)):
        yield continued(g, length, 4, arrival=arrival)


def flush_3(g):
    yield continued(g, 70, 188, "kjv")


def exit_depths(g):
    forced = continued(g, 40, 152)
    # Runs of one depth (1 to 9 tokens) and single tokens; every 64-token flush then holds streams of four different lengths.
    depths = []
    while len(depths) < 152:
        depths += [g.between(1, 4)] * (g.between(1, 9) if g.between(0, 2) == 0 else 1)
    # A whole flushed block (positions 64..127, continuation 24..87) may not lack a depth, and its first and last rows differ.
    depths[24], depths[87] = 1, 4
    yield dict(forced, exit_depths=depths[:152])


def exit_threshold(g):
    text = g.characters(ALPHANUMERIC, 24)
    prose = passage(g, 30, "kjv")
    # Prose, a string that cannot be guessed, its copy that can, prose: hazards from hesitant to sure.
    yield request(prose + b"\n<", text.encode() + f"><{text}>\n".encode() + passage(g, 46, "kjv"))


def greedy(g):
    # The question ends where the code begins; the model closes its answer with ']', which ends the request.
    asked_needle = needle(g, 150, 1)
    question = bytes(asked_needle["forced"][:asked_needle["answer_mask"].index(1)])
    yield request(bytes(asked_needle["prompt"][1:]) + question, max_new_tokens=16, task="needle", eos_token_id=ord("]"))
    yield request(passage(g, 32, "kjv"), max_new_tokens=12)
    yield request(passage(g, 20, "kjv"), max_new_tokens=1)


def text_2048(g):
    yield continued(g, 1984, 64, "kjv")


def shared_prefix(g):
    # Two whole windows of 64 and a few tokens more in common, then other texts; one window in common; nothing in common.
    text = passage(g, 140, "kjv")
    for common, length, new_tokens, arrival in ((139, 140, 5, 0), (131, 135, 4, 6), (70, 90, 3, 8), (0, 66, 3, 10)):
        own = passage(g, max(0, length - 1 - common) + new_tokens)
        prompt = (text[:common] + own)[:length - 1]
        yield request(prompt, own[-new_tokens:], arrival=arrival)


def batch(g):
    # Decode rows come and go, one to eight at a time, while longer prompts are still being read.
    for length, new_tokens, arrival in ((1, 8, 0), (2, 3, 0), (3, 6, 0), (5, 2, 1), (9, 7, 2), (17, 5, 2), (70, 4, 3), (130, 3, 6)):
        yield continued(g, length, new_tokens, arrival=arrival)


def cancelled(g):
    for length, new_tokens, identity in ((150, 4, 0), (30, 8, 1), (66, 30, 2), (30, 4, 1), (70, 5, 4)):
        yield continued(g, length, new_tokens, id=identity)


def interrupted(g):
    for length, new_tokens, arrival in ((130, 9, 0), (70, 8, 0), (20, 6, 2)):
        yield continued(g, length, new_tokens, arrival=arrival)


def late_end(g):
    # A question whose answer the model closes with ']', the end-of-sequence id of the first and third request.
    for eos, new_tokens, arrival in ((ord("]"), 14, 0), (NO_EOS, 5, 0), (ord("]"), 14, 1)):
        question = needle(g, 64, 1)
        start = bytes(question["forced"][:question["answer_mask"].index(1)])
        yield request(bytes(question["prompt"][1:]) + start, max_new_tokens=new_tokens, task="needle", eos_token_id=eos, arrival=arrival)


def mixed_depths(g):
    depths = ([4, 1, 3, 2, 4, 1], [4, 2, 1, 4, 3, 2], [4] * 6, [1] * 6)
    for length, exits, arrival in zip((9, 70, 33, 5), depths, (0, 0, 2, 3)):
        yield dict(continued(g, length, len(exits), arrival=arrival), exit_depths=exits)


def drafted(made, wrong=lambda j: False):
    """A forced request whose drafts are its own tokens, but where wrong(j) says so."""
    return dict(made, draft_tokens=[(token + 1) % 256 if wrong(j) else token for j, token in enumerate(made["forced"])])


def spec_reject(g):
    # A round of block_spec emits its accepted drafts and one token more, so that wrong drafts at this distance are rejected at one index.
    for index in range(4):
        yield drafted(continued(g, 20 + index, 13, seed=index), lambda j: j > 0 and (j - 1) % (index + 1) == index)
    yield drafted(continued(g, 9, 13))


def spec_flush(g):
    # With a tail of 64 the encoded frontier moves at committed length 128, with tail 0 at 64 and 128: at every row of a round of five. The last
    # two reject right before a page begins and right at it.
    for prompt in (124, 125, 126, 127, 128):
        yield drafted(continued(g, prompt, 9))
    for prompt, wrong in ((125, 2), (125, 3)):
        yield drafted(continued(g, prompt, 9), lambda j, wrong=wrong: j == wrong)


def spec_end(g):
    # The true answer and its closing ']' as drafts: the end-of-sequence id is among the accepted ones, at another place of a round each time.
    for lead in (0, 1, 2, 3):
        question = needle(g, 64, 1)
        scored = question["answer_mask"].index(1)
        answer = question["forced"][scored:scored + 6]
        prompt = bytes(question["prompt"][1:]) + bytes(question["forced"][:scored]) + bytes(answer[:lead])
        yield request(prompt, max_new_tokens=12, task="needle", eos_token_id=ord("]"), draft_tokens=answer[lead:] + [-1] * (6 + lead))


def spec_text(g):
    for length in (40, 52, 64, 76, 40, 52, 64, 76):
        yield request(passage(g, length - 1), max_new_tokens=260)


def spec_tasks(g):
    for _ in range(5):
        table, look_ups = key_values(g, 8, 4)
        for made in (needle(g, 96, 2), copy(g, 40), sums(g, 6, 6), asked(Pieces().put(table), look_ups, "kv")):
            yield answered_freely(made, 104)


def spec_sampled(g):
    for i, temperature in enumerate((0.5, 0.75, 1.0)):
        yield request(passage(g, 24, "kjv"), max_new_tokens=16, temperature=temperature, seed=g.next() >> 1)


# ---- quality: tasks of models/ouro-small/tasks.py, the hard part in the prompt, so that every feature of the method can spoil it ---------

def after_prose(generator, length, task):
    """The task at the end of a prompt of `length` tokens (BOS included), prose before it."""
    return passage(generator, length - 1 - len(task)) + task


def letters(generator, count):
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    return [alphabet[i] for i in generator.permutation(len(alphabet))[:count]]


def quality_text(length):
    def requests(g):
        for source in ("kjv",) * 4 + ("jargon",) * 3 + ("devil",):
            yield continued(g, length, 128, source)
    return requests


def quality_needle(length):
    return lambda g: (needle(g, length, 4) for _ in range(8))


def quality_kv(g):
    for _ in range(8):
        table, questions = key_values(g, 24, 12)
        yield asked(Pieces().put(after_prose(g, 512, table.encode())), questions, "kv")


def quality_chain(hops):
    """A table of 20 letters that forms one cycle, 16 starts; the answer is `hops` steps away."""
    def requests(g):
        for _ in range(12):
            cycle = letters(g, 20)
            table = [f"{cycle[i]}>{cycle[(i + 1) % 20]}" for i in g.permutation(20)]
            questions = Pieces()
            for i in g.permutation(20)[:16]:
                questions.put(f"{hops}{cycle[i]}=").put(cycle[(i + hops) % 20], scored=True).put(";")
            yield asked(Pieces().put(after_prose(g, 512, ("\n" + " ".join(table) + "\n").encode())), questions, "other")
    return requests


def quality_swap(swaps):
    """Five letters, pairs of places that change their content, then what lies in three of the places."""
    def requests(g):
        for _ in range(32):
            row = letters(g, 5)
            text = "\n" + "".join(row) + " "
            for _ in range(swaps):
                a, b = g.permutation(5)[:2]
                row[a], row[b] = row[b], row[a]
                text += f"{a + 1}{b + 1} "
            questions = Pieces()
            for place in g.permutation(5)[:3]:
                questions.put(f"?{place + 1}=").put(row[place], scored=True)
            yield asked(Pieces().put(after_prose(g, 128, text.encode())), questions.put("\n"), "other")
    return requests


def quality_sum(terms):
    """One sum that ends the prompt: the first generated token is part of the answer."""
    def requests(g):
        for _ in range(64):
            digits = [g.between(0, 9) for _ in range(terms)]
            prompt = after_prose(g, 96, ("\n" + "+".join(map(str, digits)) + "=").encode())
            yield asked(Pieces().put(prompt), Pieces().put(f"{sum(digits) % 100:02d}", scored=True).put(";"), "sum")
    return requests


QUALITY = {
    **{f"quality-text-{n}": (f"Prose, eight prompts of {n} tokens, 128 forced tokens each", quality_text(n)) for n in (256, 512, 1024, 1792)},
    **{f"quality-needle-{n}": (f"Eight prompts of {n} tokens with four codes each, asked in another order", quality_needle(n)) for n in (512, 1024, 1792)},
    "quality-kv": ("Eight tables of 24 keys and values after prose, prompts of 512 tokens, twelve look-ups each", quality_kv),
    **{f"quality-chain-{n}": (f"Twelve tables followed {n} times from 16 starts each, prompts of 512 tokens", quality_chain(n)) for n in range(1, 7)},
    **{f"quality-swap-{n}": (f"32 rows of five letters after {n} swaps, three places asked, prompts of 128 tokens", quality_swap(n)) for n in (2, 4, 6, 8)},
    **{f"quality-sum-{n}": (f"64 sums of {n} digits that end prompts of 96 tokens", quality_sum(n)) for n in (4, 8, 16)},
}

TRACES = {
    **QUALITY,
    "boundary-short": ("Prompts of 1, 7, 63, 64, 65 tokens, two forced tokens each: around one 64-token group", boundary_short),
    "boundary-long": ("Prompts of 127, 128, 129, 191, 192 tokens, two forced tokens each: around two and three 64-token groups", boundary_long),
    "four": ("Four requests with prompts of 9, 70, 130, 260 tokens arriving at submissions 0, 0, 1, 2; four forced tokens each", four),
    "flush-3": ("Prose, prompt 70, 188 forced: with tail 64 the rolling policy flushes at committed lengths 128, 192 and 256", flush_3),
    "exit-depths": ("Prose, prompt 40, 152 forced with exit depths 1 to 4: two flushed blocks hold exited tokens", exit_depths),
    "exit-threshold": ("Prompt ending in '<', then 98 forced tokens: a random string, its copy, prose", exit_threshold),
    "greedy": ("Free running: an answer closed by ']' as end-of-sequence id, prose of 12 tokens, prose of one token", greedy),
    "copy": ("A string of 40 characters to be copied, 38 of them scored", lambda g: iter([copy(g, 40)])),
    "sum": ("Six solved sums in the prompt, six to be solved", lambda g: iter([sums(g, 6, 6)])),
    "needle-2k": ("Four codes in 1900 tokens of prose, asked in another order", lambda g: iter([needle(g, 1900, 4)])),
    "text-2048": ("Prose, prompt 1984, 64 forced: all 2048 positions of the shipped model", text_2048),
    "shared-prefix": ("Four prompts of 140, 135, 90, 66 tokens, alike in their first 140, 132, 71 and 1, arriving at 0, 6, 8, 10", shared_prefix),
    "batch": ("Eight requests of 1 to 130 tokens that arrive and end at different times: one to eight decode rows beside prompts", batch),
    "cancelled": ("Cancelled in the prompt, in an early and in a late decode row; an id taken over from a cancelled request; one undisturbed", cancelled,
                  [(2, "cancel", 0), (8, "cancel", 1), (8, "reuse_id", 3), (30, "cancel", 2)]),
    "interrupted": ("Three requests preempted and resumed at different boundaries, the first four times", interrupted,
                    [(1, "preempt", 0), (3, "resume", 0), (6, "preempt", 0), (6, "preempt", 1), (9, "resume", 0), (10, "resume", 1), (15, "preempt", 0),
                     (17, "preempt", 2), (19, "resume", 2), (20, "resume", 0), (25, "preempt", 0), (29, "resume", 0)]),
    "late-end": ("Free running: two answers closed by ']' as end-of-sequence id before their last token, one without end-of-sequence id", late_end),
    "spec-reject": ("Forced, with given drafts: rejected by block speculation at index 0, 1, 2, 3 in every round, and never", spec_reject),
    "spec-flush": ("Forced, with given drafts: rounds of five rows across position 128 at every offset, and rejections around it", spec_flush),
    "spec-end": ("Free running, with the answers as drafts: the end-of-sequence id at different places of a round", spec_end),
    "spec-text": ("Prose, free running: eight prompts of 40 to 76 tokens, 260 new tokens each", spec_text),
    "spec-tasks": ("Needles, copies, sums and tables, five of each, free running: prompts of 47 to 116 tokens, 104 new tokens each", spec_tasks),
    "spec-sampled": ("Free running at temperatures 0.5, 0.75 and 1: seeded sampling", spec_sampled),
    "mixed-depths": ("Four requests with forced exit depths: 4,1,3,2,4,1; 4,2,1,4,3,2; all 4; all 1", mixed_depths),
}


def make(name):
    description, requests, *events = TRACES[name]
    trace = dict(name=name, description=description, source="data/make_traces.py, generator seeded by the name; data/corpus/*.held.txt", requests=[])
    for i, made in enumerate(requests(Generator(name))):
        trace["requests"].append(dict(id=i, arrival=0, eos_token_id=NO_EOS, seed=0) | made)
    trace["events"] = events[0] if events else []
    return trace


def write(path, trace):
    with h5py.File(path, "w-", libver=("earliest", "v108")) as file:
        file.attrs["format"] = "loopgauge-trace"
        file.attrs["version"] = 2 if any("temperature" in made or "draft_tokens" in made for made in trace["requests"]) else 1
        for key in ("name", "description", "source"):
            file.attrs[key] = trace[key]
        file.attrs["vocab_size"] = VOCAB
        for i, made in enumerate(trace["requests"]):
            group = file.create_group(f"requests/{i}")
            for key in ("id", "arrival", "max_new_tokens", "eos_token_id", "seed", "task"):
                group.attrs[key] = made[key]
            if "temperature" in made:
                group.attrs["temperature"] = made["temperature"]
            for key, dtype in (("prompt", "<i4"), ("forced", "<i4"), ("exit_depths", "u1"), ("answer_mask", "u1"), ("draft_tokens", "<i4")):
                if made.get(key) is not None:
                    values = np.asarray(made[key], dtype)
                    packed = dict(compression="gzip", shuffle=True) if trace["name"] in QUALITY and values.size >= 1024 else {}
                    group.create_dataset(key, data=values, track_times=False, **packed)
        if trace["events"]:
            submissions, kinds, targets = zip(*trace["events"])
            group = file.create_group("events")
            group.create_dataset("submission", data=np.asarray(submissions, "<i4"), track_times=False)
            group.create_dataset("kind", data=list(kinds), dtype=h5py.string_dtype(), track_times=False)
            group.create_dataset("request", data=np.asarray(targets, "<i4"), track_times=False)


def read(path):
    """The file in the form that make() returns."""
    with h5py.File(path, "r") as file:
        trace = {key: file.attrs[key] for key in ("name", "description", "source")}
        trace["requests"] = []
        for i in range(len(file["requests"])):
            group = file[f"requests/{i}"]
            found = {key: value if isinstance(value, str) else float(value) if key == "temperature" else int(value)
                     for key, value in group.attrs.items()}
            trace["requests"].append(found | {key: dataset[()].tolist() for key, dataset in group.items()})
        events = file.get("events", {"submission": [], "kind": [], "request": []})
        trace["events"] = [(int(at), kind.decode(), int(target)) for at, kind, target in zip(events["submission"], events["kind"], events["request"])]
    return trace


def check(name):
    """Empty when the published file holds what make(name) makes, else the first difference."""
    path = HERE / "traces" / f"{name}.h5"
    if not path.exists():
        return f"{name}: not published"
    published, made = read(path), make(name)
    for key in ("name", "description", "source", "events"):
        if published[key] != made[key]:
            return f"{name}: {key} differs"
    if len(published["requests"]) != len(made["requests"]):
        return f"{name}: {len(published['requests'])} requests published, {len(made['requests'])} made"
    for i, (old, new) in enumerate(zip(published["requests"], made["requests"])):
        new = {key: value for key, value in new.items() if value is not None}
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                return f"{name}: requests/{i}/{key} differs"
    return ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--check", action="store_true", help="compare the published traces with freshly made ones")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(TRACES))
    if unknown:
        parser.error(f"no such trace: {', '.join(unknown)}; known: {', '.join(TRACES)}")
    names = arguments.names or list(TRACES)
    if arguments.check:
        differences = [text for text in map(check, names) if text]
        print("\n".join(differences) or f"{len(names)} traces as made")
        return 1 if differences else 0
    for name in names:
        path = HERE / "traces" / f"{name}.h5"
        if path.exists():
            print(f"{path.name}: published already, left as it is")
            continue
        trace = make(name)
        write(path, trace)
        print(f"{path.name}: {sum(len(r['prompt']) + r['max_new_tokens'] for r in trace['requests'])} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
