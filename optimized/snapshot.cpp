// SPDX-License-Identifier: Apache-2.0
#include "optimized/snapshot.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string_view>
#include <type_traits>

#include "models/sha256.hpp"

namespace loopgauge::optimized {
namespace {

static_assert(std::endian::native == std::endian::little, "snapshots are little-endian");

constexpr std::string_view kMagic = "LGSNAPSH";
constexpr std::uint32_t kVersion = 2;
constexpr std::size_t kDigestOffset = 32, kDigestBytes = 64, kHeaderBytes = kDigestOffset + kDigestBytes;
constexpr std::array<std::string_view, 4> kExtentNames{"layers", "heads", "head_dim", "hidden"};

struct Header {
  char magic[8];
  std::uint32_t version;
  std::uint32_t zero;
  std::uint64_t description_bytes, payload_bytes;
};
static_assert(sizeof(Header) == kDigestOffset);

class Writer {
 public:
  template <class T>
  void operator()(const T& value) {
    if constexpr (std::is_same_v<T, bool>) {
      append(static_cast<std::uint8_t>(value));
    } else {
      static_assert(std::is_trivially_copyable_v<T>);
      append(value);
    }
  }
  void operator()(const std::string& text) { list(text.data(), text.size()); }
  template <class T>
  void operator()(const std::vector<T>& values) {
    static_assert(std::is_trivially_copyable_v<T> && std::has_unique_object_representations_v<T>);
    list(values.data(), values.size());
  }
  std::vector<std::byte> bytes;

 private:
  template <class T>
  void append(const T& value) {
    list_bytes(&value, sizeof value);
  }
  template <class T>
  void list(const T* values, std::size_t count) {
    append(static_cast<std::uint64_t>(count));
    list_bytes(values, count * sizeof(T));
  }
  void list_bytes(const void* data, std::size_t count) {
    const auto* first = static_cast<const std::byte*>(data);
    bytes.insert(bytes.end(), first, first + count);
  }
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <class T>
  void operator()(T& value) {
    if constexpr (std::is_same_v<T, bool>) {
      std::uint8_t byte = 0;
      take(&byte, 1);
      value = byte != 0;
    } else {
      take(&value, sizeof value);
    }
  }
  void operator()(std::string& text) {
    text.resize(count(1));
    take(text.data(), text.size());
  }
  template <class T>
  void operator()(std::vector<T>& values) {
    values.resize(count(sizeof(T)));
    take(values.data(), values.size() * sizeof(T));
  }
  bool at_end() const { return bytes_.empty(); }

 private:
  std::size_t count(std::size_t element_bytes) {
    std::uint64_t value = 0;
    take(&value, sizeof value);
    if (value > bytes_.size() / element_bytes)
      throw SnapshotError("snapshot: a list of " + std::to_string(value) + " elements exceeds the description");
    return static_cast<std::size_t>(value);
  }
  void take(void* target, std::size_t count) {
    if (count > bytes_.size()) throw SnapshotError("snapshot: the description ends early");
    if (count != 0) std::memcpy(target, bytes_.data(), count);
    bytes_ = bytes_.subspan(count);
  }
  std::span<const std::byte> bytes_;
};

// One order of members for both directions: `visit` is a Writer or a Reader.
template <class Visitor, class Owner>
requires std::is_same_v<std::remove_const_t<Owner>, SnapshotOwner>
void describe(Visitor& visit, Owner& owner) {
  visit(owner.model_sha256);
  visit(owner.configuration);
  visit(owner.extents);
  visit(owner.prompt_length);
  visit(owner.capacity);
  visit(owner.tokens_sha256);
  visit(owner.request);
}

template <class Visitor, class State>
requires std::is_same_v<std::remove_const_t<State>, RequestSnapshot>
void describe(Visitor& visit, State& state) {
  visit(state.complete_windows);
  visit(state.committed);
  visit(state.encoded);
  visit(state.encoded_ahead);
  visit(state.unreadable);
  visit(state.incarnations);
  visit(state.kv.max_positions);
  visit(state.kv.maps);
  visit(state.kv.resident);
  visit(state.kv.blocks);
  visit(state.windows);
  visit(state.row_position);
  visit(state.row_completed);
  visit(state.row_last_loop);
  visit(state.row_depth_given);
  visit(state.row_committed);
  visit(state.row_key);
  visit(state.has_reference);
  visit(state.reference_state);
}

std::string digest(std::span<const std::byte> snapshot) {
  Sha256 hash;
  hash.update(snapshot.data(), kDigestOffset);
  hash.update(snapshot.data() + kHeaderBytes, snapshot.size() - kHeaderBytes);
  return hash.hex_digest();
}

template <class T>
void require_same(std::string_view field, const T& found, const T& expected) {
  if (found == expected) return;
  const auto text = [](const T& value) {
    if constexpr (std::is_same_v<T, std::string>)
      return value;
    else
      return std::to_string(value);
  };
  throw SnapshotError("snapshot: " + std::string(field) + " is " + text(found) + ", this run needs " + text(expected));
}

Header header_of(std::span<const std::byte> snapshot) {
  Header header{};
  std::memcpy(&header, snapshot.data(), sizeof header);
  return header;
}

}  // namespace

std::vector<std::byte> begin_snapshot(const SnapshotOwner& owner, const RequestSnapshot& state, std::size_t payload_bytes) {
  Writer description;
  describe(description, owner);
  describe(description, state);
  Header header{};
  std::copy(kMagic.begin(), kMagic.end(), header.magic);
  header.version = kVersion;
  header.description_bytes = description.bytes.size();
  header.payload_bytes = payload_bytes;
  std::vector<std::byte> snapshot(kHeaderBytes + description.bytes.size() + payload_bytes);
  std::memcpy(snapshot.data(), &header, sizeof header);
  std::copy(description.bytes.begin(), description.bytes.end(), snapshot.begin() + kHeaderBytes);
  return snapshot;
}

std::span<std::byte> payload_of(std::vector<std::byte>& snapshot) {
  return std::span(snapshot).last(static_cast<std::size_t>(header_of(snapshot).payload_bytes));
}

void seal_snapshot(std::vector<std::byte>& snapshot) {
  const std::string checksum = digest(snapshot);
  std::memcpy(snapshot.data() + kDigestOffset, checksum.data(), kDigestBytes);
}

OpenedSnapshot open_snapshot(std::span<const std::byte> snapshot, const SnapshotOwner& owner) {
  if (snapshot.size() < kHeaderBytes) throw SnapshotError("snapshot: " + std::to_string(snapshot.size()) + " bytes are less than a header");
  const Header header = header_of(snapshot);
  if (std::string_view(header.magic, sizeof header.magic) != kMagic)
    throw SnapshotError("snapshot: it does not begin with " + std::string(kMagic));
  require_same<std::uint32_t>("version", header.version, kVersion);
  const std::size_t rest = snapshot.size() - kHeaderBytes;
  if (header.description_bytes > rest || header.payload_bytes != rest - header.description_bytes) {
    throw SnapshotError("snapshot: length is " + std::to_string(snapshot.size()) + " bytes, the header says " +
                        std::to_string(kHeaderBytes) + " + " + std::to_string(header.description_bytes) + " + " +
                        std::to_string(header.payload_bytes));
  }
  require_same<std::string>("checksum", std::string(reinterpret_cast<const char*>(snapshot.data()) + kDigestOffset, kDigestBytes),
                            digest(snapshot));

  Reader description(snapshot.subspan(kHeaderBytes, static_cast<std::size_t>(header.description_bytes)));
  SnapshotOwner found;
  describe(description, found);
  require_same("model_sha256", found.model_sha256, owner.model_sha256);
  require_same("configuration", found.configuration, owner.configuration);
  for (std::size_t i = 0; i < kExtentNames.size(); ++i) require_same(kExtentNames[i], found.extents[i], owner.extents[i]);
  require_same("prompt_length", found.prompt_length, owner.prompt_length);
  require_same("capacity", found.capacity, owner.capacity);
  require_same("tokens_sha256", found.tokens_sha256, owner.tokens_sha256);
  require_same("request", found.request, owner.request);

  OpenedSnapshot opened;
  describe(description, opened.state);
  if (!description.at_end()) throw SnapshotError("snapshot: the description has bytes after its last field");
  opened.payload = snapshot.last(static_cast<std::size_t>(header.payload_bytes));
  return opened;
}

}  // namespace loopgauge::optimized
