# SPDX-License-Identifier: Apache-2.0
"""The tasks of ouro-small are solved here from their text alone; training and held-out texts share no passage; a seed names its sequences."""
import pathlib
import random
import re
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "models" / "ouro-small"))
import tasks

HELD = tasks.load_held_out(ROOT / "data" / "corpus")


def text_of(parts):
    return "".join(text if isinstance(text, str) else text.decode("latin-1") for text, _ in parts)


class Tasks(unittest.TestCase):
    def test_chains_follow_their_table(self):
        for hops in (None, *tasks.HOPS):
            table, questions = text_of(tasks.chain(random.Random(hops), hops)).strip("\n").split("\n")
            follow = dict(entry.split(">") for entry in table.split())
            self.assertEqual(set(follow), set(follow.values()))
            asked = re.findall(r"(\d)(\w)=(\w);", questions)
            self.assertEqual("".join(f"{n}{start}={end};" for n, start, end in asked), questions)
            for steps, start, end in asked:
                if hops: self.assertEqual(int(steps), hops)
                for _ in range(int(steps)): start = follow[start]
                self.assertEqual(start, end)

    def test_swaps_move_letters(self):
        for swaps in (None, *tasks.SWAPS):
            head, *rest = text_of(tasks.swap(random.Random(swaps), swaps)).strip().split(" ")
            row, pairs, questions = list(head), rest[:-1], rest[-1]
            if swaps: self.assertEqual(len(pairs), swaps)
            for a, b in (map(int, pair) for pair in pairs): row[a - 1], row[b - 1] = row[b - 1], row[a - 1]
            asked = re.findall(r"\?(\d)=(\w)", questions)
            self.assertEqual(len(asked), 3)
            for place, letter in asked: self.assertEqual(row[int(place) - 1], letter)

    def test_sums_are_right_modulo_100(self):
        for terms in (None, 4, 16):
            for line in text_of(tasks.sums(random.Random(terms), terms)).strip("\n;").split(";"):
                left, right = line.split("=")
                self.assertEqual(sum(map(int, left.split("+"))) % 100, int(right))
                if terms: self.assertEqual(left.count("+") + 1, terms)

    def test_retrieval_answers_stand_in_the_prompt(self):
        text = text_of(tasks.needle(random.Random(1), 900, HELD, 4))
        for name, code in re.findall(r"\[The code of (\w+)\? (\d{5})\]", text): self.assertIn(f"[The code of {name} is {code}]", text)
        self.assertEqual(len(re.findall(r"\? \d{5}\]", text)), 4)
        text = text_of(tasks.kv(random.Random(1), 12))
        for key, value in re.findall(r"\?(\w+):(\d+)\n", text): self.assertIn(f"\n{key}:{value}\n", text)

    def test_only_answers_and_prose_are_scored(self):
        for kind in tasks.KINDS:
            ids, weights = tasks.task(random.Random(3), kind, 500, HELD)
            self.assertEqual((len(ids), len(weights)), (501, 501))
            self.assertEqual((ids[0], weights[0]), (tasks.BOS, 0))
            scored = "".join(chr(i) for i, w in zip(ids, weights) if w >= tasks.ANSWER)
            if kind in ("text", "copy"): self.assertEqual(scored, "")
            else: self.assertRegex(scored, r"^[a-z]+$" if kind in ("chain", "swap") else r"^\d+$")
            self.assertEqual((ids, weights), tasks.task(random.Random(3), kind, 500, HELD), "a seed names its sequence")

    def test_held_out_text_is_not_trained_on(self):
        training = tasks.load_training(ROOT / "models" / "ouro-tiny" / "corpus")
        for name, text in HELD.items():
            for begin in range(0, len(text) - 200, len(text) // 50): self.assertNotIn(text[begin:begin + 200], training[name])

    def test_blocks_cover_the_text_in_order(self):
        blocks = tasks.held_out_blocks(HELD["devil"], 1000)
        self.assertEqual(len(blocks), len(HELD["devil"]) // 1000)
        self.assertEqual(bytes(blocks[3][0][1:]), HELD["devil"][3000:4000])


if __name__ == "__main__":
    unittest.main()
