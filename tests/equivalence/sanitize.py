#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every case of a set on the CUDA runtime under a tool of compute-sanitizer, several at once.

    sanitize.py --program LOOPGAUGE --tool racecheck [--set smoke] [--select GLOB ...] [--only NAME ... | --without NAME ...] [--devices 0,1]
                [--at-once N] [--seconds S] [--host-gib G] [--log FILE]

A line of the log per case, as JSON: case, tool, kernels (all, or which), outcome, seconds, host_gib (the most of its processes together) and, where it
is not clean, what was said. Outcomes: clean; errors (the tool reports some); failed (the program itself did); killed (by a signal from outside:
racecheck keeps gigabytes of host memory a process); cut off (--seconds were over). Cases that the log has as clean with the same tool, program and device are not run again. Kernels of libraries are
left out of racecheck; copies of whole pages, which hold rows that nobody has written yet, out of initcheck. Racecheck judges every access to shared
memory on the CPU, and nearly all are those of products (`linear`, `decode_projections`), whose launches are the same in most cases of a set: with
`--without linear decode_projections` over all of it and `--only` these over some it takes minutes of 16 cores, not an hour.

Exit status: 0 every case is clean, 1 the tool reports errors or the program fails, 5 not every case came to its end, 77 there is nothing to check with.
"""
import argparse
import fnmatch
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

# Until a stream is synchronized racecheck keeps what it has seen of every launch: 76 GiB of host memory for a case.
TOOLS = {
    "memcheck": [],
    "racecheck": ["--force-synchronization-limit", "1"],
    "initcheck": ["--check-api-memory-access", "no"],
    "synccheck": ["--num-cuda-barriers", "512"],  # of a block: more than it expects by itself, after which launches fail
}
OWN_KERNELS = "_kernel"
ERRORS_EXIT = 99
NOTHING_FOUND = re.compile(r"SUMMARY: 0 (errors|hazards)")
PAGE = os.sysconf("SC_PAGE_SIZE")


def kernel_filters(options):
    """Options of the tool that say which kernels it looks at."""
    names = options.only or ([OWN_KERNELS] if options.tool == "racecheck" else [])
    return [word for name in names for word in ("--kernel-name", f"kns={name}")] + [word for name in options.without for word in ("--kernel-name-exclude", f"kns={name}")]


def kernels_in_words(options):
    return f"only {' '.join(options.only)}" if options.only else f"without {' '.join(options.without)}" if options.without else "all"


def resident_by_group():
    """Bytes of host memory by process group."""
    sums = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            group = int((folder / "stat").read_text().rpartition(")")[2].split()[2])
            sums[group] = sums.get(group, 0) + int((folder / "statm").read_text().split()[1]) * PAGE
        except (OSError, IndexError, ValueError):
            continue  # it has ended
    return sums


class Check:
    """One case under the tool, in a process group of its own."""

    def __init__(self, options, case, device):
        self.case, self.device, self.begin, self.most_bytes, self.cut_off = case, device, time.monotonic(), 0, False
        self.output = tempfile.TemporaryFile(mode="w+", errors="replace")
        command = [options.sanitizer, "--tool", options.tool, *kernel_filters(options), *TOOLS[options.tool], "--error-exitcode", str(ERRORS_EXIT), options.program, "run", case, "--executor", "optimized"]
        environment = dict(os.environ, CUDA_VISIBLE_DEVICES=device, OMP_NUM_THREADS="1")
        self.process = subprocess.Popen(command, stdout=self.output, stderr=subprocess.STDOUT, env=environment, start_new_session=True)

    def stop(self):
        self.cut_off = True
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def row(self, tool, kernels, identity):
        self.output.seek(0)
        text = self.output.read()
        code = self.process.returncode
        if self.cut_off:
            outcome = "cut off"
        elif code == 0 and NOTHING_FOUND.search(text):
            outcome = "clean"
        elif code == ERRORS_EXIT:
            outcome = "errors"
        elif code < 0 or code == int(signal.SIGKILL):  # the tool ends with the number of the signal that ended the program
            outcome = "killed"
        else:
            outcome = "failed"
        row = {"case": self.case, "tool": tool, "kernels": kernels, "outcome": outcome, "seconds": round(time.monotonic() - self.begin, 1), "host_gib": round(self.most_bytes / 2**30, 2), "program": identity}
        if outcome != "clean":
            said = [line for line in text.splitlines() if line.startswith("=========") or "loopgauge:" in line]
            row["exit"], row["said"] = code, (said or text.splitlines())[-20:]
        return row


def cases_of(options):
    listed = subprocess.run([options.program, "list", "--set", options.set], capture_output=True, text=True, check=True).stdout.split("\n")
    cases = [line.split()[0] for line in listed if line.strip()]
    return [case for case in cases if any(fnmatch.fnmatchcase(case, glob) for glob in options.select)]


def known_clean(log, tool, kernels, identity):
    if not log or not log.exists():
        return set()
    rows = (json.loads(line) for line in log.read_text().splitlines() if line.strip())
    return {row["case"] for row in rows if row["outcome"] == "clean" and row["tool"] == tool and row.get("kernels", "all") in (kernels, "all") and row["program"] == identity}


def run(options, cases, record):
    """Calls `record` with the row of every case that was begun; returns how many were not."""
    waiting, running = list(cases), []
    places = [device for _ in range(options.at_once) for device in options.devices.split(",")]
    end, largest = time.monotonic() + options.seconds, 0
    while waiting or running:
        sums = resident_by_group()
        for check in running:
            check.most_bytes = max(check.most_bytes, sums.get(check.process.pid, 0))
            largest = max(largest, check.most_bytes)
        late = time.monotonic() >= end
        for check in [check for check in running if late or check.process.poll() is not None]:
            if check.process.poll() is None:
                check.stop()
            running.remove(check)
            places.append(check.device)
            record(check)
        if late:
            break
        used = sum(sums.get(check.process.pid, 0) for check in running)
        while waiting and places and (not running or used + largest <= options.host_gib * 2**30):
            running.append(Check(options, waiting.pop(0), places.pop(0)))
            used += largest
        time.sleep(0.1)
    return len(waiting)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--program", required=True, help="the loopgauge program")
    parser.add_argument("--tool", required=True, choices=sorted(TOOLS))
    parser.add_argument("--set", default="smoke", help="set of cases (loopgauge list --help)")
    parser.add_argument("--select", nargs="+", default=["*"], metavar="GLOB", help="cases of the set, such as '*/t1s1q1*/seven'")
    kernels = parser.add_mutually_exclusive_group()
    kernels.add_argument("--only", nargs="+", default=[], metavar="NAME", help="only kernels whose names contain one of these")
    kernels.add_argument("--without", nargs="+", default=[], metavar="NAME", help="no kernels whose names contain one of these")
    parser.add_argument("--devices", default="0", help="numbers of devices, separated by commas")
    parser.add_argument("--at-once", type=int, default=4, help="cases at once on a device")
    parser.add_argument("--seconds", type=float, default=86400, help="time for everything")
    parser.add_argument("--host-gib", type=float, default=float("inf"), help="host memory for everything: no case begins beyond it")
    parser.add_argument("--log", type=pathlib.Path, help="file that a line per case is added to")
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="the tool's program")
    options = parser.parse_args()
    if options.at_once < 1:
        parser.error("--at-once is at least 1")
    if shutil.which(options.sanitizer) is None:
        print(f"skipped: {options.sanitizer} is not there (part of the CUDA toolkit)")
        return 77
    probe = subprocess.run([options.program, "run", "serial/t0s0q0/one", "--executor", "optimized"], capture_output=True, text=True)
    if probe.returncode == 4:
        print(f"skipped: {probe.stderr.strip()}")
        return 77

    identity = hashlib.sha256(pathlib.Path(options.program).read_bytes()).hexdigest()[:16]
    cases = cases_of(options)
    if not cases:
        parser.error(f"no case of set {options.set} matches {' '.join(options.select)}")
    done = known_clean(options.log, options.tool, kernels_in_words(options), identity)
    counts = {}

    def record(check):
        row = check.row(options.tool, kernels_in_words(options), identity)
        counts[row["outcome"]] = counts.get(row["outcome"], 0) + 1
        if options.log:
            with options.log.open("a") as log:
                log.write(json.dumps(row) + "\n")
        if row["outcome"] != "clean":
            print(f"{row['outcome']}: {row['case']}, {row['seconds']} s, {row['host_gib']} GiB\n  " + "\n  ".join(row["said"]), flush=True)

    begin = time.monotonic()
    left = run(options, [case for case in cases if case not in done], record)
    counts["clean"] = counts.get("clean", 0) + len(done & set(cases))
    words = [f"{counts[word]} {word}" for word in ("clean", "errors", "failed", "killed", "cut off") if counts.get(word)]
    print(f"{options.tool} of {kernels_in_words(options)} kernels over {len(cases)} cases of {options.set}: {', '.join(words)}{f', {left} not begun' if left else ''}, {time.monotonic() - begin:.0f} s")
    if counts.get("errors") or counts.get("failed"):
        return 1
    return 0 if counts.get("clean", 0) == len(cases) else 5


if __name__ == "__main__":
    sys.exit(main())
