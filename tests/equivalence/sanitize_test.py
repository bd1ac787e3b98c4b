#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""sanitize.py beside a program and a tool that only pretend: what it makes of everything that a tool may do."""
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).with_name("sanitize.py")

PROGRAM = """#!/bin/sh
case "$1" in
  list) for c in clean-1 clean-2 racy broken killed slow; do echo "serial/t0s0q0/$c"; done;;
  run) exit {run_exit};;
esac
"""
TOOL = """#!/bin/sh
# --tool T [options] --error-exitcode N PROGRAM run CASE --executor optimized
echo "$@" >> {calls}
for word in "$@"; do case "$word" in serial/*) case=${{word##*/}};; esac; done
case "$case" in
  clean-*) echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)";;
  racy) echo "========= Error: Race reported"; exit 99;;
  broken) echo "loopgauge: no"; exit 6;;
  killed) exit 9;;
  slow) sleep 30;;
esac
"""


class Sanitize(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.path = pathlib.Path(self.folder.name)
        self.calls, self.log = self.path / "calls", self.path / "log"
        self.write("program", PROGRAM.format(run_exit=0))
        self.write("tool", TOOL.format(calls=self.calls))

    def write(self, name, text):
        (self.path / name).write_text(text)
        (self.path / name).chmod(0o755)

    def run_script(self, *arguments, tool="racecheck"):
        command = [sys.executable, SCRIPT, "--program", self.path / "program", "--tool", tool, "--sanitizer", self.path / "tool", "--log", self.log, *arguments]
        return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=60)

    def outcomes(self):
        return {row["case"].split("/")[-1]: row["outcome"] for row in map(json.loads, self.log.read_text().splitlines())}

    def test_every_outcome_is_told_apart(self):
        result = self.run_script("--seconds", "3", "--at-once", "6")
        self.assertEqual(self.outcomes(), {"clean-1": "clean", "clean-2": "clean", "racy": "errors", "broken": "failed", "killed": "killed", "slow": "cut off"})
        self.assertEqual(result.returncode, 1, result.stdout + result.stderr)
        self.assertIn("2 clean, 1 errors, 1 failed, 1 killed, 1 cut off", result.stdout)
        self.assertIn("Race reported", result.stdout)

    def test_cases_that_do_not_end_are_no_pass(self):
        self.assertEqual(self.run_script("--select", "*/clean-*", "*/killed").returncode, 5)
        result = self.run_script("--select", "*/slow", "*/clean-*", "--at-once", "1", "--seconds", "1")
        self.assertEqual(result.returncode, 5)
        # A tool that says nothing has checked nothing.
        self.write("tool", "#!/bin/sh\nexit 0\n")
        self.assertEqual(self.run_script("--select", "*/clean-1", tool="memcheck").returncode, 1)

    def test_clean_cases_are_not_run_again_by_the_same_program(self):
        self.assertEqual(self.run_script("--select", "*/clean-*").returncode, 0)
        calls = self.calls.read_text()
        self.assertEqual(self.run_script("--select", "*/clean-*").returncode, 0)
        self.assertEqual(self.calls.read_text(), calls)
        self.run_script("--select", "*/clean-*", tool="memcheck")
        self.assertNotEqual(self.calls.read_text(), calls)
        calls = self.calls.read_text()
        self.write("program", PROGRAM.format(run_exit=0) + "# another build\n")
        self.run_script("--select", "*/clean-*")
        self.assertNotEqual(self.calls.read_text(), calls)

    def test_part_of_the_kernels_is_not_the_whole(self):
        select = ("--select", "*/clean-1")
        for part, passed_on in ((("--without", "linear"), "--kernel-name kns=_kernel --kernel-name-exclude kns=linear "), (("--only", "linear"), "--kernel-name kns=linear --force"),
                                (("--without", "linear", "norm"), "--kernel-name kns=_kernel --kernel-name-exclude kns=linear --kernel-name-exclude kns=norm ")):
            result = self.run_script(*select, *part)
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn(passed_on, self.calls.read_text())
            self.assertIn(f"racecheck of {part[0][2:]} {' '.join(part[1:])} kernels over 1 cases", result.stdout)
        self.assertEqual([row["kernels"] for row in map(json.loads, self.log.read_text().splitlines())], ["without linear", "only linear", "without linear norm"])
        calls = self.calls.read_text()
        self.run_script(*select)  # neither part stands for all of them
        self.assertNotEqual(self.calls.read_text(), calls)
        calls = self.calls.read_text()
        self.run_script(*select, "--only", "linear")
        self.assertEqual(self.calls.read_text(), calls)
        self.assertEqual(self.run_script(*select, "--only", "linear", "--without", "linear").returncode, 2)

    def test_tools_get_their_options(self):
        for tool, option in (("racecheck", "--kernel-name kns=_kernel --force-synchronization-limit 1"), ("initcheck", "--check-api-memory-access no"),
                             ("synccheck", "--num-cuda-barriers 512")):
            self.run_script("--select", "*/clean-1", tool=tool)
            self.assertIn(f"--tool {tool} {option} --error-exitcode 99 ", self.calls.read_text())

    def test_without_a_device_or_a_tool_it_is_skipped_with_the_reason(self):
        self.write("program", PROGRAM.format(run_exit=4))
        self.assertEqual(self.run_script().returncode, 77)
        result = subprocess.run([sys.executable, str(SCRIPT), "--program", str(self.path / "program"), "--tool", "memcheck", "--sanitizer", "no-such-tool"], capture_output=True, text=True)
        self.assertEqual(result.returncode, 77)
        self.assertIn("no-such-tool", result.stdout)

    def test_nothing_to_check_is_a_usage_error(self):
        self.assertEqual(self.run_script("--select", "none*").returncode, 2)

    def test_host_memory_bounds_what_begins(self):
        # Every case counts as the largest so far; the first runs whatever the bound.
        self.assertEqual(self.run_script("--select", "*/clean-*", "--host-gib", "0").returncode, 0)


if __name__ == "__main__":
    unittest.main()
