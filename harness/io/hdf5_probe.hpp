// SPDX-License-Identifier: Apache-2.0
// The HDF5 library can crash, or loop, on a corrupt file. A child process finds out first.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace loopgauge::harness::h5 {

// Forks a child that reads every group, attribute and dataset of the file. Throws FileError when the child is killed by a signal or does
// not come to an end; what the library refuses in an orderly way is left for the caller to meet and to name. Where the system cannot fork,
// nothing is probed.
void probe_in_child(const std::filesystem::path& path);

// The same for any way of reading `path`, given `cpu_seconds` of processor time and ten times as much on the clock.
void probe_in_child(const std::filesystem::path& path, const std::function<void()>& read, unsigned cpu_seconds);

// Reads in children, all at the same time, and returns what each read made: a crash is met once and in another process, and the parts are
// read in parallel, which the HDF5 library cannot do in one. Each child has `cpu_seconds` as above. Throws FileError as above, and with the
// sentence of an Error that a read throws (of the first such child). Where the system cannot fork, the reads run here one after the other.
std::vector<std::string> read_in_children(const std::filesystem::path& path, const std::vector<std::function<std::string()>>& reads,
                                          unsigned cpu_seconds);

}  // namespace loopgauge::harness::h5
