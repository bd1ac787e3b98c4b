#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds the program several ways and compares the digests of every dump of a set: the reference's bits must not depend on compiler,
optimization level, instruction set or thread count.

    compare_builds.py --source DIR --work DIR --set NAME [--filter GLOB] [--builds gcc-O3,clang-O0,...] [--program PATH] [--golden FILE]

--program names a finished build whose digests join the comparison; --filter is that of `loopgauge sweep`; --golden names a committed
baseline: where that file exists, the digests must also be those that it records. Exit status: 0 all equal, 1 a digest differs, 2 a build
or a run failed or the arguments are wrong, 77 fewer than two builds are possible here (skipped, says why).
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import time

# name -> (C++ compiler, C++ flags, threads)
BUILDS = {
    "gcc-O3": ("g++", "-O3", 1),
    "gcc-O3-threads2": ("g++", "-O3", 2),       # the binary of gcc-O3
    "gcc-O0": ("g++", "-O0", 1),
    "gcc-native": ("g++", "-O3 -march=native", 1),
    "clang-O3": ("clang++", "-O3", 2),
    "clang-O0": ("clang++", "-O0", 1),
    "clang-native": ("clang++", "-O3 -march=native", 1),
}


def build(name, source, work):
    """path of the program built as `name` says"""
    compiler, flags, _ = BUILDS[name]
    folder = os.path.join(work, "build-" + name.removesuffix("-threads2"))
    program = os.path.join(folder, "harness", "loopgauge")
    commands = [
        ["cmake", "-S", source, "-B", folder, "-G", "Ninja", "-DLOOPGAUGE_CUDA=OFF", "-DLOOPGAUGE_TESTS=OFF", "-DCMAKE_BUILD_TYPE=None",
         f"-DCMAKE_CXX_COMPILER={compiler}", f"-DCMAKE_CXX_FLAGS={flags}"],
        ["cmake", "--build", folder, "--target", "loopgauge", "--parallel", "2"],
    ]
    for command in commands:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            print(f"{name}: {' '.join(command)}\n{done.stdout[-4000:]}")
            sys.exit(2)
    return program


def digests(program, name, threads, arguments, work):
    """case id -> digest over all groups, of the reference's rows"""
    report = os.path.join(work, name + ".h5")
    environment = dict(os.environ, OMP_NUM_THREADS=str(threads))
    command = [program, "sweep", "--set", arguments.set, "--executor", "reference", "--report", report]
    if arguments.filter:
        command += ["--filter", arguments.filter]
    begin = time.monotonic()
    swept = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    print(f"{name}: swept in {time.monotonic() - begin:.0f} s", flush=True)
    if swept.returncode:
        print(f"{name}: sweep failed\n{swept.stdout[-4000:]}")
        sys.exit(2)
    shown = subprocess.run([program, "report", report, "--json"], stdout=subprocess.PIPE, text=True, env=environment, check=True)
    found = {}
    for case in json.loads(shown.stdout)["cases"]:
        groups = {row["group"]: row["sha256"] for row in case["tables"]["digests"]}
        found[case["id"]] = groups["all"]
    return found


def golden_digests(path):
    """case id -> the beginning of the digest over all groups that the baseline `path` records for the reference"""
    found = {}
    with open(path, encoding="utf-8") as lines:
        for words in map(str.split, lines):
            if len(words) == 4 and words[1:3] == ["reference", "digest"]:
                found[words[0]] = words[3]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--source", required=True)
    parser.add_argument("--work", required=True)
    parser.add_argument("--set", default="smoke")
    parser.add_argument("--filter")
    parser.add_argument("--builds", default=",".join(BUILDS))
    parser.add_argument("--program")
    parser.add_argument("--golden")
    arguments = parser.parse_args()

    wanted = arguments.builds.split(",")
    for name in wanted:
        if name not in BUILDS:
            parser.error(f"'{name}' is none of the builds {', '.join(BUILDS)}")
    usable = [name for name in wanted if shutil.which(BUILDS[name][0])]
    for name in wanted:
        if name not in usable:
            print(f"{name}: left out, {BUILDS[name][0]} is not installed")
    if len(usable) + bool(arguments.program) < 2:
        print("skipped: fewer than two builds are possible here")
        return 77
    os.makedirs(arguments.work, exist_ok=True)
    results = {}
    if arguments.program:
        results["program"] = digests(arguments.program, "program", 2, arguments, arguments.work)
    for name in usable:
        results[name] = digests(build(name, arguments.source, arguments.work), name, BUILDS[name][2], arguments, arguments.work)

    first = next(iter(results))
    different = 0
    for name, found in results.items():
        if found.keys() != results[first].keys() or not found:
            print(f"{name}: {len(found)} cases, {first} has {len(results[first])}")
            different += 1
            continue
        for case in sorted(found):
            if not found[case] or found[case] != results[first][case]:
                different += 1
                print(f"{case}: {name} {found[case] or 'no digest'}, {first} {results[first][case]}")
    golden_text = "no golden file"
    if arguments.golden and os.path.exists(arguments.golden):
        golden = golden_digests(arguments.golden)
        known = sorted(golden.keys() & results[first].keys())
        golden_text = f"{len(known)} of the cases in {os.path.basename(arguments.golden)}"
        if not known:
            different += 1
            print(f"{arguments.golden} records the digest of none of these cases: it cannot confirm them")
        for case in known:
            if not results[first][case].startswith(golden[case]):
                different += 1
                print(f"{case}: {first} {results[first][case]}, golden {golden[case]}")
    print(f"{len(results[first])} cases x {len(results)} builds ({', '.join(results)}), {golden_text}: {different} differences")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
