#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Replays the independent cases of data/cases and judges them: the declared profile by data/cases/compare.py, the double profile by its
distance from the `exact` file.

    run_cases.py --program LOOPGAUGE [--select GLOB ...] [--executor optimized]      (globs on <trace>/<case>, all by default)

The optimized executor has the declared profile only; a case of KNOWN_FLIPS may fall either way there. The parameters of a case are the
attributes of its expected file. Exit status: 0 all agree, 1 one does not, 3 nothing to judge.
"""
import argparse
import fnmatch
import pathlib
import re
import subprocess
import sys
import tempfile

import h5py
import numpy as np

SOURCE = pathlib.Path(__file__).resolve().parents[2]
CASES = SOURCE / "data/cases"

# The exact files keep 16 mantissa bits of a logit, up to 1.3e-4 at their magnitude; everything beyond is a difference of two float64 orders.
EXACT_LOGIT_LIMIT = 1e-3

# Cases that the comparator refuses for a reason that is no fault of either side. Each must show nothing but explained flips and moved
# logits, and must pass once the selected tokens are taken from the expected file.
KNOWN_FLIPS = {
    "kv-700/t1s1q1.streaming.w256":
        "loop 3 selects position 336 instead of 507 in window 1: their scores differ by 0.4 %, within the order noise of the bf16 profile; "
        "the streaming policy carries the exchanged token through the codec into one row's logits (max 2.64, limit 1)",
}
ONLY_LOGITS = re.compile(r"request \d+: (max\|dlogit\||mean KL|max KL) \S+ above \S+")


def text(value):
    return value.decode() if isinstance(value, bytes) else str(value)


def case_flags(expected):
    """The flags of `loopgauge run` for the configuration that an expected file states."""
    with h5py.File(expected) as file:
        at = {key: value for key, value in file.attrs.items()}
    switches = text(at["switches"])
    flags = ["--mode", text(at["mode"]), "--switches", switches, "--trace", str(SOURCE / "data/traces" / f"{text(at['trace'])}.h5")]
    if text(at["exit"]) != "full":
        raise ValueError(f"{expected}: exit {text(at['exit'])} is not replayed here")
    if "t1" in switches:
        flags += ["--retention", ",".join(str(int(bp)) for bp in at["retention_bp"])]
    if "s1" in switches:
        flags += ["--key-fraction", str(int(at["decode_key_bp"]))]
    if "q1" in switches:
        flags += ["--policy", text(at["policy"]), "--timing", text(at["timing"]), "--tail", str(int(at["tail"]))]
    if switches != "t0s0q0":
        flags += ["--window", str(int(at["window"]))]
    return flags


def run(program, flags, dump):
    result = subprocess.run([program, "run", *flags, "--dump", str(dump)], capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"loopgauge run {' '.join(flags)} exits with {result.returncode}: {result.stderr.strip()}")


def compare(expected, dump):
    result = subprocess.run([sys.executable, str(CASES / "compare.py"), str(expected), str(dump)], capture_output=True, text=True)
    return result.returncode, result.stdout + result.stderr


def judge_declared(program, executor, name, expected, folder):
    """Faults of the declared profile, as sentences."""
    dump = folder / "declared.h5"
    flags = [*case_flags(expected), "--executor", executor]
    run(program, flags, dump)
    status, output = compare(expected, dump)
    verdict = output.strip().splitlines()[-1]
    if name not in KNOWN_FLIPS:
        return [] if status == 0 else [f"compare.py exits with {status}:\n{output}"]
    if status == 0:
        return ["passes without forced decisions; take it out of KNOWN_FLIPS"] if executor == "reference" else []
    faults = []
    reasons = verdict.partition("groups compared; ")[2].rstrip(")").split("; ")
    if status != 1 or not all(ONLY_LOGITS.fullmatch(reason) for reason in reasons):
        faults.append(f"more than logits behind explained flips differs:\n{output}")
    if not any(" flip " in line and line.endswith(" explained") for line in output.splitlines()):
        faults.append(f"no selected token differs, so that the known reason is not the reason:\n{output}")
    run(program, [*flags, "--decisions", str(expected)], dump)
    status, output = compare(expected, dump)
    if status != 0:
        faults.append(f"differs with the expected file's decisions too, compare.py exits with {status}:\n{output}")
    return faults


def datasets(group):
    found = {}

    def keep(name, item):
        if isinstance(item, h5py.Dataset):
            found[name] = item[()]

    group.visititems(keep)
    return found


def judge_exact(program, expected, folder):
    """Faults of the double profile, and the largest distance of a logit."""
    dump = folder / "double.h5"
    run(program, [*case_flags(expected), "--profile", "double", "--dump-only", "tokens,logits,active,keys,encoded_frontier"], dump)
    faults, farthest = [], 0.0
    with h5py.File(expected) as e, h5py.File(dump) as a:
        if list(e["requests"]) != list(a["requests"]):
            return [f"requests {list(a['requests'])}, expected {list(e['requests'])}"], farthest
        for request in e["requests"]:
            x, y = datasets(e["requests"][request]), datasets(a["requests"][request])
            if not {"tokens", "logits"} <= x.keys() & y.keys():
                faults.append(f"request {request}: tokens or logits are absent")
                continue
            for name in x:
                if name == "logits":
                    distance = float(np.abs(x[name] - y[name]).max()) if x[name].shape == y[name].shape else np.inf
                    farthest = max(farthest, distance)
                    if not distance <= EXACT_LOGIT_LIMIT:
                        faults.append(f"request {request}: logits differ by {distance:.3g}, limit {EXACT_LOGIT_LIMIT:g}")
                elif name.split("/")[0] in ("tokens", "active", "keys", "encoded_frontier"):
                    if name not in y or not np.array_equal(x[name], y[name]):
                        faults.append(f"request {request}: {name} is not what double precision decides")
    return faults, farthest


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--program", required=True, help="the loopgauge program")
    parser.add_argument("--executor", default="reference", choices=["reference", "optimized"])
    parser.add_argument("--select", nargs="+", default=["*"], metavar="GLOB", help="cases, such as 'kv-700/*' or 'seven/t1s1q1.*'")
    options = parser.parse_args()

    judged, failed = 0, 0
    unmatched = set(options.select)
    for expected in sorted((CASES / "expected").glob("*/*.bf16.h5")):
        name = f"{expected.parent.name}/{expected.name.removesuffix('.bf16.h5')}"
        matching = {glob for glob in options.select if fnmatch.fnmatchcase(name, glob)}
        if not matching:
            continue
        unmatched -= matching
        with tempfile.TemporaryDirectory() as folder:
            try:
                faults = [f"declared: {fault}" for fault in judge_declared(options.program, options.executor, name, expected, pathlib.Path(folder))]
                distance = float("nan")
                if options.executor == "reference":
                    exact = expected.with_name(expected.name.replace(".bf16.h5", ".exact.h5"))
                    exact_faults, distance = judge_exact(options.program, exact, pathlib.Path(folder))
                    faults += [f"double: {fault}" for fault in exact_faults]
            except (OSError, KeyError, ValueError, RuntimeError) as error:
                faults, distance = [str(error)], float("nan")
        judged += 1
        failed += bool(faults)
        known = f" (known: {KNOWN_FLIPS[name]})" if name in KNOWN_FLIPS else ""
        double = f"  double max|dlogit| {distance:.2g}" if options.executor == "reference" else ""
        print(f"{'FAIL' if faults else 'ok  '} {name}{double}{known}", flush=True)
        for fault in faults:
            print(f"     {fault}", flush=True)
    if unmatched:
        print(f"no case matches {' '.join(sorted(unmatched))}", file=sys.stderr)
        return 3
    print(f"{judged} cases, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
