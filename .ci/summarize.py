#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Ends a test run: what took longest, what failed, what was skipped and why, and `N passed, N failed, N skipped`.

    summarize.py CTEST_JUNIT_FILE CTEST_EXIT_STATUS

Exit status 1 if a test failed, ctest failed or nothing was run.
"""
import collections
import re
import sys
import xml.etree.ElementTree


def skip_reason(case):
    """GoogleTest prints the reason after `FILE:LINE: Skipped`, scripts after `skipped: `."""
    output = case.findtext("system-out") or ""
    found = re.search(r": Skipped\n(.+)", output) or re.search(r"^skipped: (.+)", output, re.MULTILINE)
    return found.group(1).strip() if found else (case.find("skipped").get("message") if case.find("skipped") is not None else case.get("status"))


def main():
    cases = xml.etree.ElementTree.parse(sys.argv[1]).getroot().findall("testcase")
    failed = [case for case in cases if case.find("failure") is not None]
    skipped = [case for case in cases if case not in failed and (case.find("skipped") is not None or case.get("status") in ("notrun", "disabled"))]
    for case in sorted(cases, key=lambda case: -float(case.get("time", 0)))[:10]:
        print(f"{float(case.get('time', 0)):7.1f} s  {case.get('name')}")
    by_reason = collections.defaultdict(list)
    for case in skipped:
        by_reason[skip_reason(case)].append(case.get("name"))
    for reason, names in by_reason.items():
        print(f"skipped: {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {reason}")
    for case in failed:
        print("failed:", case.get("name"))
    print(f"{len(cases) - len(failed) - len(skipped)} passed, {len(failed)} failed, {len(skipped)} skipped")
    return 1 if failed or not cases or sys.argv[2] != "0" else 0


if __name__ == "__main__":
    sys.exit(main())
