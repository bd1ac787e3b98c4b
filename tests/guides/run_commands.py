#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the commands that README and the guides print, as a reader would: in a clone, with `loopgauge` on PATH.

    run_commands.py --source DIR --program FILE run DOCUMENT...   the blocks fenced as sh, command by command, each document in a folder of its own
    run_commands.py --source DIR --program FILE inline            every `loopgauge ...` in the running text of any document, and in the help
                                                                of any subcommand: the verb and its flags exist

A block begins with ```sh and may say more: `sh gpu` runs where `loopgauge doctor --executor optimized` finds a device and is listed as not run elsewhere; `sh build` prepares
the program and is only checked for naming what exists. A comment `exits with N` after a command is its expected exit status, 0 without one.
Exit status 77 (skipped) when every command of the documents needs a GPU and there is none.
"""
import argparse
import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time

OPTIONS = argparse.Namespace()
WRITTEN_BY_GUIDES = ("reports",)  # copied for them; other folders of the tree are linked


def documents():
    for folder, folders, files in os.walk(OPTIONS.source):
        folders[:] = [name for name in folders if not name.startswith((".", "build"))]
        for name in files:
            if name.endswith(".md"):
                yield os.path.relpath(os.path.join(folder, name), OPTIONS.source)


def text_of(document):
    with open(os.path.join(OPTIONS.source, document), encoding="utf-8") as file:
        return file.read()


def blocks(document):
    """(words after sh, commands) of every block fenced as sh; a command may span lines."""
    for info, body in re.findall(r"^```sh\b([^\n]*)\n(.*?)^```", text_of(document), re.MULTILINE | re.DOTALL):
        commands = [line for line in re.sub(r"\\\n\s*", "", body).splitlines() if line.strip() and not line.lstrip().startswith("#")]
        yield info.split(), commands


def expected_status(command):
    found = re.search(r"#.*\bexits with (\d+)", command)
    return int(found.group(1)) if found else 0


@functools.lru_cache(maxsize=None)
def has_device():
    environment = dict(os.environ, LOOPGAUGE_HOME=OPTIONS.source)
    result = subprocess.run([OPTIONS.program, "doctor", "--executor", "optimized"], capture_output=True, text=True, env=environment)
    return result.returncode != 4  # "something this build or machine cannot do"


def check_build_command(command):
    words = shlex.split(command, comments=True)
    with open(os.path.join(OPTIONS.source, "CMakePresets.json"), encoding="utf-8") as file:
        presets = json.load(file)
    for index, word in enumerate(words):
        if word.startswith(".ci/"):
            assert os.access(os.path.join(OPTIONS.source, word), os.X_OK), f"{word} is not there"
        if word == "--preset":
            kind = "testPresets" if words[0] == "ctest" else "buildPresets" if "--build" in words[max(0, index - 1):index] else "configurePresets"
            names = [preset["name"] for preset in presets[kind]]
            assert words[index + 1] in names, f"{command}: no preset {words[index + 1]} among {names}"


def clone(folder):
    """What a clone looks like, without writing to the source tree."""
    for name in sorted(os.listdir(OPTIONS.source)):
        source = os.path.join(OPTIONS.source, name)
        if name.startswith("build") or name == ".git":
            continue
        if name in WRITTEN_BY_GUIDES:
            shutil.copytree(source, os.path.join(folder, name))
        else:
            os.symlink(source, os.path.join(folder, name))


def run_document(document):
    environment = dict(os.environ, LOOPGAUGE_HOME=OPTIONS.source, PATH=os.path.dirname(OPTIONS.program) + os.pathsep + os.environ["PATH"])
    run = left_out = 0
    with tempfile.TemporaryDirectory() as folder:
        clone(folder)
        for words, commands in blocks(document):
            assert set(words) <= {"gpu", "build"}, f"{document}: ```sh {' '.join(words)}"
            for command in commands:
                if "build" in words:
                    check_build_command(command)
                elif "gpu" in words and not has_device():
                    print(f"needs a GPU, not run: {command}")
                    left_out += 1
                else:
                    begin = time.monotonic()
                    result = subprocess.run(["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True)
                    print(f"{time.monotonic() - begin:6.1f} s  {command}", flush=True)
                    assert result.returncode == expected_status(command), (
                        f"{document}: {command}\nexits with {result.returncode}, expected {expected_status(command)}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}")
                    run += 1
    print(f"{document}: {run} commands run, {left_out} need a GPU")
    return run, left_out


@functools.lru_cache(maxsize=None)
def help_of(verbs):
    result = subprocess.run([OPTIONS.program, *verbs, "--help"], capture_output=True, text=True)
    assert result.returncode == 0, f"loopgauge {' '.join(verbs)} --help exits with {result.returncode}"
    return result.stdout


def subcommands(verbs):
    after = help_of(verbs).split("ubcommands:", 1)
    return re.findall(r"^  (\w+) ", after[1].split("\n\n", 1)[0], re.MULTILINE) if len(after) > 1 else []


def check_command(where, command):
    """The verb, its subcommand and every flag of a `loopgauge ...` exist; arguments are not judged."""
    words = shlex.split(command)[1:]
    assert words[0] in subcommands(()), f"{where}: `{command}`: no such subcommand"
    verbs = tuple(words[:2]) if len(words) > 1 and words[1] in subcommands((words[0],)) else (words[0],)
    for word in words:
        if word.startswith("-"):
            flag = word.split("=")[0]
            assert re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", help_of(verbs)), f"{where}: `{command}`: {' '.join(verbs)} has no {flag}"


def check_help():
    """The examples that the help of every subcommand ends with: text after several blanks is said about them."""
    verbs = [(top,) for top in subcommands(())]
    verbs += [top + (sub,) for top in verbs for sub in subcommands(top)]
    commands = [(" ".join(("loopgauge",) + verb + ("--help",)), command) for verb in verbs
                for line in re.findall(r"^  (loopgauge .*)$", help_of(verb), re.MULTILINE)
                for command in re.split(r" (?:&&|>) ", re.split("  +", line)[0]) if command.startswith("loopgauge ")]
    for where, command in commands:
        check_command(where, command)
    return len(commands)


def check_inline():
    checked = 0
    for document in documents():
        text = text_of(document)
        for line in text.splitlines():
            assert not re.match(r"    \s*(loopgauge|\.ci/|cmake|ctest) ", line), f"{document}: fence this command as sh, so that it is run: {line.strip()}"
        for command in re.findall(r"`(loopgauge [a-z][^`]*)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)):
            check_command(document, command)
            checked += 1
    assert checked > 20, checked
    fenced = sorted(document for document in documents() if any(True for _ in blocks(document)))
    assert fenced == sorted(OPTIONS.documents), f"documents with commands: {fenced}; tests run: {sorted(OPTIONS.documents)}"
    print(f"{checked} commands in running text, {check_help()} in help texts, {len(fenced)} documents with commands that are run")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", required=True)
    parser.add_argument("--program", required=True)
    parser.add_argument("what", choices=("run", "inline"))
    parser.add_argument("documents", nargs="+")
    parser.parse_args(namespace=OPTIONS)
    OPTIONS.source = os.path.realpath(OPTIONS.source)
    if OPTIONS.what == "inline":
        return check_inline()
    counts = [run_document(document) for document in OPTIONS.documents]
    if sum(run for run, _ in counts) == 0 and any(left for _, left in counts):
        print("skipped: every command needs a GPU")
        return 77


if __name__ == "__main__":
    sys.exit(main())
