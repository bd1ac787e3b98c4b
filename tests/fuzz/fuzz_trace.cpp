// SPDX-License-Identifier: Apache-2.0
// The trace reader on hostile bytes. The HDF5 library parses most of them; this layer's part is to look before it opens, to bound what is
// read, and to turn every refusal into a sentence. An accepted input must be a valid trace that survives writing and reading.
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "harness/io/hdf5.hpp"
#include "harness/io/trace_file.hpp"
#include "tests/fuzz/fuzz_driver.hpp"

// libhdf5 asks for what a corrupt length says and copes with the refusal, which AddressSanitizer would otherwise make fatal. What the
// library leaks on its own error paths is not ours to mend.
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1:detect_leaks=0"; }

namespace {

using loopgauge::Trace;
using loopgauge::TraceRequest;
using loopgauge::fuzz::Bytes;
namespace fs = std::filesystem;
namespace harness = loopgauge::harness;

// A folder of this process, removed at its end.
class Folder {
 public:
  Folder() : path_(fs::temp_directory_path() / ("loopgauge-fuzz-trace-" + std::to_string(getpid()))) { fs::create_directories(path_); }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

const Folder& folder() {
  static const Folder instance;
  return instance;
}

auto fields(const TraceRequest& r) {
  return std::tie(r.id, r.arrival, r.max_new_tokens, r.eos_token_id, r.seed, r.task, r.prompt, r.forced, r.exit_depths, r.answer_mask);
}

void fuzz_one_input(std::span<const std::uint8_t> bytes) {
  const fs::path input = folder().path() / "input.h5", copy = folder().path() / "copy.h5";
  std::ofstream(input, std::ios::binary).write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  const Trace trace = harness::read_trace(input);
  if (!loopgauge::trace_faults(trace).empty()) throw std::logic_error("accepted a trace with faults");
  harness::write_trace(copy, trace);
  const Trace again = harness::read_trace(copy);
  if (again.name != trace.name || again.vocab_size != trace.vocab_size || again.requests.size() != trace.requests.size()) {
    throw std::logic_error("a trace changes when it is written and read");
  }
  for (std::size_t i = 0; i < trace.requests.size(); ++i) {
    if (fields(trace.requests[i]) != fields(again.requests[i])) throw std::logic_error("a request changes when it is written and read");
  }
}

Bytes bytes_of(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
}

TraceRequest request(int id) {
  TraceRequest made;
  made.id = id;
  made.max_new_tokens = 3;
  made.prompt = {256, 1, 2, 3, 4};
  made.forced = {5, 6, 7};
  made.exit_depths = {1, 2, 4};
  made.answer_mask = {0, 1, 1};
  return made;
}

std::vector<Bytes> fuzz_seeds() {
  std::vector<Bytes> seeds;
  const fs::path path = folder().path() / "seed.h5";
  Trace trace;
  trace.name = "seed";
  trace.vocab_size = 264;
  trace.requests = {request(0)};
  harness::write_trace(path, trace);
  seeds.push_back(bytes_of(path));
  trace.requests.push_back(request(1));
  trace.events = {{1, loopgauge::TraceEventKind::preempt, 0}, {2, loopgauge::TraceEventKind::resume, 0}};
  harness::write_trace(path, trace);
  seeds.push_back(bytes_of(path));

  // The same content chunked, shuffled and deflated.
  harness::h5::File file = harness::h5::File::create(path);
  {
    const harness::h5::Group root = file.root();
    root.set_attribute("format", "loopgauge-trace");
    root.set_attribute("version", 1);
    for (const char* name : {"name", "description", "source"}) root.set_attribute(name, "seed");
    root.set_attribute("vocab_size", 264);
    const harness::h5::Group out = root.require_group("requests/0");
    for (const char* name : {"id", "arrival", "eos_token_id", "seed"}) out.set_attribute(name, 0);
    out.set_attribute("max_new_tokens", 200);
    out.set_attribute("task", "text");
    out.write("prompt", std::vector<std::int32_t>(300, 7), harness::h5::kCompressed);
    out.write("forced", std::vector<std::int32_t>(200, 9), harness::h5::kCompressed);
  }
  file.close();
  seeds.push_back(bytes_of(path));
  return seeds;
}

}  // namespace

LOOPGAUGE_FUZZ_ENTRY(fuzz_one_input, fuzz_seeds)
