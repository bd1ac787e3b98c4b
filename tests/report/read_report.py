#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reads a report the way its users do.

    read_report.py form REPORT            checks what reports/SCHEMA.md promises of the form of the file, with h5py
    read_report.py snippets REPORT NAME   runs the Python blocks of reports/README.md that import NAME (h5py, pandas or xarray)

Exit status 77 (skipped) with the reason where a module is missing.
"""
import os
import re
import sys

README = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../reports/README.md")
NEEDED = {"h5py": ("h5py",), "pandas": ("h5py", "pandas"), "xarray": ("h5py", "xarray", "h5netcdf")}


def read_table(h5py, group, axis):
    """The columns of one table group by name, each on the group's own dimension scale."""
    columns = {}
    scale = group[axis]
    assert h5py.h5ds.is_scale(scale.id), f"{scale.name} is not a dimension scale"
    for name, dataset in group.items():
        assert dataset.ndim == 1 and len(dataset) == len(scale), f"{dataset.name}: {dataset.shape}"
        assert isinstance(dataset.attrs["units"], str) and dataset.attrs["description"], dataset.name
        if name != axis:
            assert dataset.dims[0][0].name == scale.name, f"{dataset.name} is on another scale"
        if len(dataset) >= 64:
            assert dataset.chunks and dataset.compression == "gzip", f"{dataset.name} is not compressed"
        columns[name] = dataset.asstr()[()] if h5py.check_string_dtype(dataset.dtype) else dataset[()]
    assert list(columns[axis]) == list(range(len(scale)))
    return columns


def check_form(path):
    import h5py
    import numpy as np
    with h5py.File(path) as report:
        assert report.attrs["format"] == "loopgauge-report" and report.attrs["version"] == 1
        for attribute in ("tool_version", "source_revision", "model_sha256", "device", "configuration", "command_line", "seed"):
            assert attribute in report["meta"].attrs, attribute
        cases = read_table(h5py, report["cases"], "case")
        for n, (case_id, status) in enumerate(zip(cases["id"], cases["status"])):
            group = report[f"case/{n}"]
            assert group.attrs["id"] == case_id
            tables = {name: read_table(h5py, table, "entry") for name, table in group.items()}
            if status == "passed":
                rows = tables["drift"]
                assert rows["kl"].dtype == np.float64 and np.all(rows["kl"] >= 0)
                continuation = rows["kl"][rows["row"] > 0]
                assert abs(continuation.mean() - cases["kl_mean"][n]) <= 1e-12
                assert {"checks", "digests", "drift_summary", "memory", "timing"} <= set(tables)
            else:
                assert not tables and cases["reason"][n]
        print(len(cases["id"]), "rows")


def run_snippets(path, name):
    for module in NEEDED[name]:
        try:
            __import__(module)
        except ImportError as error:
            print(f"skipped: {error}")
            return 77
    with open(README, encoding="utf-8") as file:
        blocks = re.findall(r"^```python\n(.*?)^```", file.read(), re.MULTILINE | re.DOTALL)
    # A block belongs to the last of its modules: the one that pandas or xarray reads is not h5py's.
    def module(block):
        return [word for word in re.findall(r"\w+", " ".join(re.findall(r"^import ([^#\n]*)", block, re.MULTILINE)))][-1]

    blocks = [block for block in blocks if module(block) == name]
    assert blocks, f"reports/README.md has no block for {name}"
    for block in blocks:
        assert "smoke.h5" in block
        scope = {}
        exec(compile(block.replace("smoke.h5", path), "reports/README.md", "exec"), scope)
        if name != "h5py":
            assert "status" in list(scope["cases"]) and "kl" in list(scope["drift"]) and len(scope["drift"]["kl"]) > 0, block
    print(len(blocks), "blocks")
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "form":
        check_form(sys.argv[2])
    else:
        sys.exit(run_snippets(sys.argv[2], sys.argv[3]))
