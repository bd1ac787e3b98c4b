#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Two processes hand a case over, and one of them is killed at a random moment: the other must end by itself, soon, with a sentence that says so and
nothing held; then two fresh ones must do the whole case, with the digests of a run in one process. On a GPU that nobody else uses its memory must be
what it was.

usage: kill_sides.py PROGRAM [--executor NAME] [--kills N] [--at-once N] [--case CASE] [--seed N] [--device-memory GPU] [--seconds N] [--lease N]
exit code 0: all as it must be; 1: not; 77: the executor cannot run here.
"""
import argparse
import concurrent.futures
import os
import random
import signal
import subprocess
import sys
import tempfile
import time


def start(options, side, socket):
    command = [options.program, "pd", side, options.case, "--socket", socket, "--executor", options.executor, "--lease", str(options.lease)]
    if side == "serve":
        command.append("--digest")
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def whole(options, folder):
    """Both sides undisturbed: what serve prints, and how long it took."""
    socket = os.path.join(folder, "whole")
    begin = time.monotonic()
    serve, send = start(options, "serve", socket), start(options, "send", socket)
    out = serve.communicate(timeout=120)[0]
    sent = send.communicate(timeout=30)[0]
    if serve.returncode != 0 or send.returncode != 0:
        raise AssertionError(f"undisturbed: serve {serve.returncode}, send {send.returncode}\n{out}\n{sent}")
    if "held at the end: nothing" not in out or "held at the end: nothing" not in sent:
        raise AssertionError(f"something is held at the end\n{out}\n{sent}")
    return digests(out), time.monotonic() - begin


def digests(text):
    words = [line.split() for line in text.splitlines()]
    return {pair[1]: pair[0] for pair in words if len(pair) == 2 and len(pair[0]) == 64}


def kill_one(options, folder, number, delay, victim):
    socket = os.path.join(folder, str(number))
    sides = {"serve": start(options, "serve", socket), "send": start(options, "send", socket)}
    time.sleep(delay)
    other = "send" if victim == "serve" else "serve"
    sides[victim].send_signal(signal.SIGKILL)
    begin = time.monotonic()
    try:
        out = sides[other].communicate(timeout=25)[0]
    except subprocess.TimeoutExpired:
        sides[other].kill()
        return f"{number}: {other} goes on after {victim} was killed at {delay:.2f} s\n{sides[other].communicate()[0]}"
    took = time.monotonic() - begin
    sides[victim].communicate()
    code = sides[other].returncode
    where = f"{number}: {victim} killed at {delay:.2f} s, {other} ended with {code} after {took:.1f} s"
    if code == 0:  # it had done everything
        return None if sides[victim].returncode in (0, -9) and "held at the end: nothing" in out else f"{where}\n{out}"
    # The victim died before they met, or before its first word: nothing had begun.
    alone = "--socket" in out and ("has come" in out or "waits there" in out) or "handoff socket" in out and "has ended before its first word" in out
    told = "was not handed over" in out and "held here afterwards: nothing" in out
    if code != 3 or not (alone or told):
        return f"{where}\n{out}"
    return None


def device_memory(device):
    query = subprocess.run(["nvidia-smi", "-i", device, "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True, check=True)
    return int(query.stdout)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--executor", default="reference")
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--case", default="wcpb/t1s1q1:streaming:serial_aligned:w64/four")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device-memory", metavar="GPU", help="compare this GPU's memory before and after, by nvidia-smi")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no kill after so long")
    parser.add_argument("--lease", type=float, default=5, help="of both sides, in seconds")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run([options.program, "run", options.case, "--executor", options.executor, "--digest"], capture_output=True, text=True)
        if run.returncode == 4:
            print(run.stderr.strip())
            return 77
        if run.returncode != 0:
            raise AssertionError(f"the case alone: {run.returncode}\n{run.stdout}\n{run.stderr}")
        expected, seconds = whole(options, folder)
        faults = []
        if any(digests(run.stdout)[name] != digest for name, digest in expected.items()) or len(expected) < 8:
            faults.append("two processes compute something else than one")
        before = device_memory(options.device_memory) if options.device_memory else 0
        jobs = [(number, draw.uniform(0.0, 1.1 * seconds), draw.choice(["serve", "send"])) for number in range(options.kills)]
        with concurrent.futures.ThreadPoolExecutor(options.at_once) as pool:
            done = list(pool.map(lambda job: kill_one(options, folder, *job) if time.monotonic() < end else "", jobs))
        kills = sum(fault != "" for fault in done)
        faults += [fault for fault in done if fault]
        if whole(options, folder)[0] != expected:
            faults.append("two fresh processes computed something else afterwards")
        if options.device_memory:
            time.sleep(1)
            after = device_memory(options.device_memory)
            print(f"device memory in use: {before} MiB before, {after} MiB after")
            if after > before:
                faults.append("device memory is lost")
        for fault in faults:
            print(fault)
        print(f"{kills} kills, {len(faults)} faults; the whole case takes {seconds:.2f} s")
    return 1 if faults else 0


sys.exit(main())
