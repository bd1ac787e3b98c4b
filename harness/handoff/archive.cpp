// SPDX-License-Identifier: Apache-2.0
#include "harness/handoff/archive.hpp"

#include <algorithm>
#include <fstream>
#include <map>

#include "models/error.hpp"
#include "models/handoff/bytes.hpp"
#include "models/handoff/transfer.hpp"

namespace loopgauge::harness {
namespace {

using handoff::HandoffError;

constexpr std::size_t kHeaderBytes = 24;
constexpr std::size_t kMaximumTextBytes = 256;

std::vector<std::span<const std::byte>> views(const std::vector<std::vector<std::byte>>& data) { return {data.begin(), data.end()}; }

std::string text_field(handoff::ByteReader& in, const char* what) {
  const auto length = in.integer<std::uint32_t>();
  if (length > kMaximumTextBytes)
    throw HandoffError("archive: " + std::string(what) + " of " + std::to_string(length) + " bytes is longer than 256");
  std::string text = in.text(length);
  if (text != handoff::printable(text)) throw HandoffError("archive: " + std::string(what) + " '" + handoff::printable(text) + "' is no printable ASCII text");
  return text;
}

// Runs nothing.
class IdleExecutor : public Executor {
 public:
  std::string name() const override { return "archive"; }
  void begin(const Trace& trace, const EffectiveConfig&, const RunOptions&) override { trace_ = &trace; }
  void submit(const Submission&) override {}
  RunRecord finish() override {
    RunRecord record;
    record.executor = name();
    record.trace = trace_->name;
    for (const TraceRequest& request : trace_->requests) {
      record.requests.emplace_back();
      record.requests.back().outcome = RequestOutcome::cancelled;
      record.requests.back().prompt_length = request.prompt_length();
    }
    return record;
  }

 private:
  const Trace* trace_ = nullptr;
};

// Takes what is offered into an archive.
class ArchivingExecutor final : public IdleExecutor, public handoff::Target {
 public:
  explicit ArchivingExecutor(HandoffArchive& archive) : archive_(archive) {}
  handoff::Target* handoff_target() override { return this; }

  // Whatever is offered is what is expected.
  handoff::Descriptor expected(int request) const override { return open_.at(request).descriptor; }
  std::vector<handoff::Memory> reserve(int request, const handoff::Descriptor& descriptor) override {
    ArchivedHandoff& open = open_[request];
    open.descriptor = descriptor;
    std::vector<handoff::Memory> memory;
    for (const handoff::Region& region : regions_of(descriptor)) open.data.emplace_back(region.capacity);
    for (auto& bytes : open.data) memory.push_back({bytes.data(), bytes.size(), -1});
    most_bytes_ = std::max(most_bytes_, transfer_bytes());
    return memory;
  }
  void activate(int request, std::span<const handoff::RegionSummary> summaries) override {
    ArchivedHandoff& open = open_.at(request);
    const std::vector<handoff::Region> regions = regions_of(open.descriptor);
    if (const std::string fault = activation_fault(open.descriptor, regions, summaries, views(open.data)); !fault.empty())
      throw HandoffError(fault);
    open.summaries.assign(summaries.begin(), summaries.end());
    for (std::size_t i = 0; i < regions.size(); ++i) open.data[i].resize(static_cast<std::size_t>(summaries[i].bytes));
    archive_.handoffs.push_back(std::move(open));
    std::sort(archive_.handoffs.begin(), archive_.handoffs.end(),
              [](const ArchivedHandoff& a, const ArchivedHandoff& b) { return a.descriptor.request < b.descriptor.request; });
    open_.erase(request);
  }
  void abort(int request) override { open_.erase(request); }
  std::size_t transfer_bytes() const override {
    std::size_t bytes = 0;
    for (const auto& [_, open] : open_) {
      for (const auto& region : open.data) bytes += region.size();
    }
    return bytes;
  }
  std::size_t most_transfer_bytes() const override { return most_bytes_; }

 private:
  HandoffArchive& archive_;
  std::map<int, ArchivedHandoff> open_;
  std::size_t most_bytes_ = 0;
};

// Offers what an archive holds.
class ArchivedExecutor final : public IdleExecutor, public handoff::Source {
 public:
  explicit ArchivedExecutor(const HandoffArchive& archive) : archive_(archive) {}
  handoff::Source* handoff_source() override { return this; }

  handoff::Descriptor describe(int request) const override { return archived(request).descriptor; }
  std::vector<handoff::ExportedRegion> export_ready(int request, std::size_t most_bytes) override {
    const ArchivedHandoff& from = archived(request);
    std::size_t& next = next_[request];
    std::vector<handoff::ExportedRegion> regions;
    for (std::size_t bytes = 0; next < from.data.size() && (regions.empty() || bytes + from.data[next].size() <= most_bytes); ++next) {
      // A source is not written to; Memory serves both ends.
      auto* data = const_cast<std::byte*>(from.data[next].data());
      regions.push_back({static_cast<std::uint32_t>(next), {data, from.data[next].size(), -1}, from.summaries[next].checksum});
      bytes += from.data[next].size();
    }
    return regions;
  }
  bool exported_all(int request) const override {
    const auto found = next_.find(request);
    return found != next_.end() && found->second == archived(request).data.size();
  }
  void sent(int, std::uint32_t) override {}
  void release(int) override {}
  bool holds(int request) const override { return find(request) != archive_.handoffs.end(); }

 private:
  std::vector<ArchivedHandoff>::const_iterator find(int request) const {
    return std::find_if(archive_.handoffs.begin(), archive_.handoffs.end(),
                        [&](const ArchivedHandoff& handoff) { return handoff.descriptor.request == request; });
  }
  const ArchivedHandoff& archived(int request) const {
    const auto found = find(request);
    if (found == archive_.handoffs.end()) {
      std::string held;
      for (const ArchivedHandoff& handoff : archive_.handoffs) held += (held.empty() ? "" : ", ") + std::to_string(handoff.descriptor.request);
      throw HandoffError("the archive holds no handoff of request " + std::to_string(request) + " (it holds " + (held.empty() ? "none" : "those of " + held) +
                         "): export the case again");
    }
    return *found;
  }

  const HandoffArchive& archive_;
  std::map<int, std::size_t> next_;  // region to export
};

}  // namespace

std::vector<std::byte> serialize(const HandoffArchive& archive) {
  handoff::ByteWriter body;
  for (const std::string* text : {&archive.producer, &archive.trace}) {
    const std::string cut = text->substr(0, kMaximumTextBytes);
    body.integer(static_cast<std::uint32_t>(cut.size()));
    body.text(cut);
  }
  for (const ArchivedHandoff& handoff : archive.handoffs) {
    const std::vector<std::byte> descriptor = handoff::serialize(handoff.descriptor);
    body.integer(static_cast<std::uint32_t>(descriptor.size()));
    body.bytes(descriptor);
    body.integer(static_cast<std::uint32_t>(handoff.summaries.size()));
    for (const handoff::RegionSummary& summary : handoff.summaries) {
      body.integer(summary.bytes);
      body.integer(summary.checksum);
    }
    for (const auto& bytes : handoff.data) body.bytes(bytes);
  }
  handoff::ByteWriter out;
  out.text(kArchiveMagic);
  out.integer(kArchiveVersion);
  out.integer(static_cast<std::uint32_t>(archive.handoffs.size()));
  out.integer(static_cast<std::uint64_t>(kHeaderBytes + body.size() + handoff::kChecksumBytes));
  out.bytes(body.written());
  out.bytes(handoff::sha256_bytes(out.written()));
  return out.take();
}

namespace {

// How many handoffs the header says there are in a file of `bytes` bytes; throws HandoffError where it cannot be the header of one.
std::uint32_t read_header(handoff::ByteReader& in, std::uint64_t bytes) {
  if (in.text(kArchiveMagic.size()) != kArchiveMagic)
    throw HandoffError("archive: magic is not " + std::string(kArchiveMagic) + ": this is no file of handoffs");
  if (const auto version = in.integer<std::uint32_t>(); version != kArchiveVersion) {
    throw HandoffError("archive: version " + std::to_string(version) + " is not the version " + std::to_string(kArchiveVersion) +
                       " that can be read");
  }
  const auto count = in.integer<std::uint32_t>();
  if (const auto stated = in.integer<std::uint64_t>(); stated != bytes || bytes < kHeaderBytes + handoff::kChecksumBytes) {
    throw HandoffError("archive: length says " + std::to_string(stated) + " bytes, there are " + std::to_string(bytes));
  }
  return count;
}

}  // namespace

HandoffArchive parse_archive(std::span<const std::byte> bytes) {
  handoff::ByteReader header(bytes, "archive");
  const std::uint32_t count = read_header(header, bytes.size());
  const auto sum = handoff::sha256_bytes(bytes.first(bytes.size() - handoff::kChecksumBytes));
  if (!std::equal(sum.begin(), sum.end(), bytes.last(handoff::kChecksumBytes).begin())) {
    throw HandoffError("archive: checksum does not fit: the bytes have changed since they were written");
  }
  handoff::ByteReader in(bytes.first(bytes.size() - handoff::kChecksumBytes).subspan(kHeaderBytes), "archive");
  HandoffArchive archive;
  archive.producer = text_field(in, "producer");
  archive.trace = text_field(in, "trace");
  for (std::uint32_t i = 0; i < count; ++i) {
    ArchivedHandoff handoff;
    handoff.descriptor = handoff::parse_descriptor(in.take(in.integer<std::uint32_t>()));
    if (!archive.handoffs.empty() && handoff.descriptor.request <= archive.handoffs.back().descriptor.request) {
      throw HandoffError("archive: request " + std::to_string(handoff.descriptor.request) + " does not follow the one before");
    }
    const std::string who = "archive: request " + std::to_string(handoff.descriptor.request) + ": ";
    const auto regions = in.integer<std::uint32_t>();
    // The table has to be there before anything is made of what the descriptor says.
    handoff::ByteReader table(in.take(std::uint64_t{regions} * 16), "archive");
    const std::vector<handoff::Region> expected = regions_of(handoff.descriptor);
    if (regions != expected.size()) {
      throw HandoffError(who + std::to_string(regions) + " regions, the descriptor has " + std::to_string(expected.size()));
    }
    for (const handoff::Region& region : expected) {
      const auto size = table.integer<std::uint64_t>();
      handoff.summaries.push_back({size, table.integer<std::uint64_t>()});
      if (size > region.capacity)
        throw HandoffError(who + describe(region) + " has " + std::to_string(size) + " bytes, at most " + std::to_string(region.capacity) +
                           " are possible");
    }
    for (const handoff::RegionSummary& summary : handoff.summaries) {
      const auto from = in.take(summary.bytes);
      handoff.data.emplace_back(from.begin(), from.end());
    }
    if (const std::string fault = activation_fault(handoff.descriptor, expected, handoff.summaries, views(handoff.data)); !fault.empty()) {
      throw HandoffError(who + fault);
    }
    archive.handoffs.push_back(std::move(handoff));
  }
  if (in.left() != 0) {
    throw HandoffError("archive: length: " + std::to_string(in.left()) + " bytes are left behind the last of " + std::to_string(count) + " handoffs");
  }
  return archive;
}

HandoffArchive read_archive(const std::filesystem::path& path) {
  std::error_code failure;
  if (std::filesystem::exists(path, failure) && !std::filesystem::is_regular_file(path, failure))
    throw FileError("handoff archive " + path.string() + " is not a regular file");
  const std::uintmax_t size = std::filesystem::file_size(path, failure);
  std::ifstream file(path, std::ios::binary);
  if (failure || !file) throw FileError("handoff archive " + path.string() + " cannot be opened for reading" + (failure ? ": " + failure.message() : ""));
  std::vector<std::byte> bytes;
  const auto read_up_to = [&](std::size_t end) {
    const std::size_t begin = bytes.size();
    bytes.resize(end);
    if (!file.read(reinterpret_cast<char*>(bytes.data() + begin), static_cast<std::streamsize>(end - begin)))
      throw FileError("handoff archive " + path.string() + " cannot be read to its end");
  };
  try {
    if (size < kHeaderBytes + handoff::kChecksumBytes) throw HandoffError("archive: " + std::to_string(size) + " bytes hold no handoffs");
    // Of a file that is something else no more is read than shows it.
    read_up_to(static_cast<std::size_t>(std::min<std::uintmax_t>(size, kHeaderBytes)));
    handoff::ByteReader header(bytes, "archive");
    read_header(header, size);
    read_up_to(static_cast<std::size_t>(size));
    return parse_archive(bytes);
  } catch (const HandoffError& error) {
    throw HandoffError(path.string() + ": " + error.what());
  }
}

std::unique_ptr<Executor> make_archiving_executor(HandoffArchive& archive) { return std::make_unique<ArchivingExecutor>(archive); }
std::unique_ptr<Executor> make_archived_executor(const HandoffArchive& archive) { return std::make_unique<ArchivedExecutor>(archive); }

}  // namespace loopgauge::harness
