#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reads a report the way a user of h5py and pandas does and checks what reports/SCHEMA.md promises of its form."""
import sys

import h5py
import numpy as np


def read_table(group, axis):
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
    assert np.array_equal(columns[axis], np.arange(len(scale)))
    return columns


def main(path):
    with h5py.File(path) as report:
        assert report.attrs["format"] == "loopgauge-report" and report.attrs["version"] == 1
        for attribute in ("tool_version", "source_revision", "model_sha256", "device", "configuration", "command_line", "seed"):
            assert attribute in report["meta"].attrs, attribute
        cases = read_table(report["cases"], "case")
        for n, (case_id, status) in enumerate(zip(cases["id"], cases["status"])):
            group = report[f"case/{n}"]
            assert group.attrs["id"] == case_id
            tables = {name: read_table(table, "entry") for name, table in group.items()}
            if status == "passed":
                rows = tables["drift"]
                assert rows["kl"].dtype == np.float64 and np.all(rows["kl"] >= 0)
                continuation = rows["kl"][rows["row"] > 0]
                assert abs(continuation.mean() - cases["kl_mean"][n]) <= 1e-12
                assert {"checks", "digests", "drift_summary", "memory", "timing"} <= set(tables)
            else:
                assert not tables and cases["reason"][n]
        print(len(cases["id"]), "rows")


if __name__ == "__main__":
    main(sys.argv[1])
