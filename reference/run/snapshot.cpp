// SPDX-License-Identifier: Apache-2.0
#include "reference/run/snapshot.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "models/error.hpp"
#include "models/sha256.hpp"
#include "reference/run/delivery.hpp"
#include "reference/run/request_life.hpp"
#include "reference/run/speculation.hpp"

namespace loopgauge::reference {
namespace {

static_assert(std::endian::native == std::endian::little, "snapshots are written in the machine's byte order");

constexpr char kMagic[] = "LOOPSNAP";
constexpr std::size_t kMagicBytes = 8;
constexpr std::size_t kChecksumBytes = 64;

class Writer {
 public:
  template <class T>
  void value(const T& x) {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    bytes(&x, sizeof x);
  }
  template <class T>
  void list(const T* data, std::size_t count) {
    value(static_cast<std::uint64_t>(count));
    bytes(data, count * sizeof(T));
  }
  template <class T>
  void operator()(const std::vector<T>& values) {
    list(values.data(), values.size());
  }
  template <class T>
  requires std::is_arithmetic_v<T>
  void operator()(const T& x) { value(x); }
  void operator()(const std::string& text) { list(text.data(), text.size()); }
  template <class T>
  void operator()(const Tensor<T>& tensor) {
    (*this)(tensor.shape);
    (*this)(tensor.data);
  }
  template <class Real>
  void operator()(const Matrix<Real>& matrix) {
    value(static_cast<std::int64_t>(matrix.rows()));
    list(matrix.data(), static_cast<std::size_t>(matrix.size()));
  }
  void bytes(const void* data, std::size_t count) {
    const auto* from = static_cast<const std::byte*>(data);
    out_.insert(out_.end(), from, from + count);
  }
  std::vector<std::byte> take() { return std::move(out_); }

 private:
  std::vector<std::byte> out_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : rest_(bytes) {}

  template <class T>
  void value(T& x) {
    const auto from = take(sizeof x);
    std::memcpy(&x, from.data(), sizeof x);
  }
  // The bytes of `count` elements; the count is checked against what is there before anything is allocated for it.
  template <class T>
  std::span<const std::byte> list(std::size_t& count) {
    std::uint64_t stated = 0;
    value(stated);
    if (stated > rest_.size() / sizeof(T)) cut_short();
    count = static_cast<std::size_t>(stated);
    return take(count * sizeof(T));
  }
  template <class T>
  void operator()(std::vector<T>& values) {
    std::size_t count = 0;
    const auto from = list<T>(count);
    values.resize(count);
    if (count > 0) std::memcpy(values.data(), from.data(), from.size());
  }
  template <class T>
  requires std::is_arithmetic_v<T>
  void operator()(T& x) { value(x); }
  void operator()(std::string& text) {
    std::size_t count = 0;
    const auto from = list<char>(count);
    text.assign(reinterpret_cast<const char*>(from.data()), count);
  }
  template <class T>
  void operator()(Tensor<T>& tensor) {
    (*this)(tensor.shape);
    (*this)(tensor.data);
  }
  template <class Real>
  void operator()(Matrix<Real>& matrix) {
    std::int64_t rows = 0;
    value(rows);
    std::vector<Real> values;
    (*this)(values);
    const std::ptrdiff_t columns = rows == 0 ? 0 : static_cast<std::ptrdiff_t>(values.size()) / rows;
    matrix = Eigen::Map<const Matrix<Real>>(values.data(), rows, columns);
  }
  std::span<const std::byte> take(std::size_t count) {
    if (count > rest_.size()) cut_short();
    const auto taken = rest_.first(count);
    rest_ = rest_.subspan(count);
    return taken;
  }
  std::size_t left() const { return rest_.size(); }

 private:
  [[noreturn]] static void cut_short() { throw FileError("snapshot: length: it ends in the middle of a field"); }
  std::span<const std::byte> rest_;
};

// Fields in one order for both directions: `io` is a Writer or a Reader, the state const or not.
template <class Io, class Block>
void block_fields(Io& io, Block& block) {
  io(block.positions.begin);
  io(block.positions.end);
  for (auto& stream : block.streams) {
    io(stream.rows);
    if constexpr (std::is_same_v<Io, Reader>) stream.layers.resize(0);
    auto layers = static_cast<std::uint64_t>(stream.layers.size());
    io(layers);
    if constexpr (std::is_same_v<Io, Reader>) stream.layers.resize(static_cast<std::size_t>(layers));
    for (auto& layer : stream.layers) {
      io(layer.k_codes), io(layer.k_min), io(layer.k_scale);
      io(layer.v_codes), io(layer.v_min), io(layer.v_scale);
    }
  }
}

template <class Io, class Window>
void window_fields(Io& io, Window& window) {
  io(window.positions.begin);
  io(window.positions.end);
  for (auto& hidden : window.hidden) io(hidden);
  for (auto& active : window.active) io(active);
  for (auto& scores : window.scores) io(scores);
}

// All of a row but its exit hazard and its attention reference.
template <class Io, class Row>
void row_fields(Io& io, Row& row) {
  io(row.position), io(row.incarnation), io(row.token), io(row.completed_loops), io(row.last_loop), io(row.depth_given), io(row.finished);
  for (auto& hidden : row.hidden) io(hidden);
}

template <class Io, class Head>
void reference_fields(Io& io, Head& head) {
  io(head.keys), io(head.mass), io(head.output), io(head.partial);
}

// Rows at and above it are not written.
template <class P>
int written_rows(const RequestStorage<P>& h) {
  const auto last = std::find_if(h.executed_loops.rbegin(), h.executed_loops.rend(), [](std::uint8_t loops) { return loops > 0; });
  return static_cast<int>(h.executed_loops.rend() - last);
}

template <class P>
std::vector<std::byte> payload_of(RunContext<P>& run, RequestStorage<P>& h) {
  using State = typename AttentionReference<typename P::Real>::State;
  Writer out;
  const int rows = written_rows(h);
  out(rows);
  out(h.kv.rows(KvForm::exact, {0, rows}));
  out(h.kv.rows(KvForm::reconstructed, {0, rows}));
  out(h.executed_loops), out(h.window_loops);
  out(static_cast<std::uint64_t>(h.windows.size()));
  for (const auto& [index, window] : h.windows) out(index), window_fields(out, window);
  out(static_cast<std::uint64_t>(h.blocks.size()));
  for (const CodecBlock& block : h.blocks) block_fields(out, block);
  out(h.encoded), out(h.unreadable), out(h.committed), out(h.tokens), out(h.rows_finished), out(h.incarnations), out(h.ended);
  row_fields(out, h.row);
  out(h.row.hazard.survival());
  const bool has_reference = h.row.reference >= 0;
  out(has_reference);
  if (has_reference) {
    const auto& reference = run.references.at(h.row.reference);
    out(reference.state == State::reusable);
    for (const auto& head : reference.heads) reference_fields(out, head);
  }
  return out.take();
}

template <class P>
void read_payload(RunContext<P>& run, RequestState<P>& s, std::span<const std::byte> payload) {
  using State = typename AttentionReference<typename P::Real>::State;
  using Real = typename P::Real;
  RequestStorage<P>& h = *s.held;
  Reader in(payload);
  int rows = 0;
  in(rows);
  std::vector<Real> kv;
  in(kv), h.kv.set_rows(KvForm::exact, {0, rows}, kv);
  in(kv), h.kv.set_rows(KvForm::reconstructed, {0, rows}, kv);
  in(h.executed_loops), in(h.window_loops);
  std::uint64_t count = 0;
  in(count);
  for (std::uint64_t i = 0; i < count; ++i) {
    int index = 0;
    in(index);
    window_fields(in, h.windows[index]);
  }
  in(count);
  h.blocks.resize(static_cast<std::size_t>(count));
  for (CodecBlock& block : h.blocks) block_fields(in, block);
  in(h.encoded), in(h.unreadable), in(h.committed), in(h.tokens), in(h.rows_finished), in(h.incarnations), in(h.ended);
  row_fields(in, h.row);
  Real survival = 1;
  in(survival);
  h.row.hazard = ExitHazard<P>::with_survival(survival);
  bool has_reference = false;
  in(has_reference);
  if (has_reference) {
    h.row.reference = run.references.acquire(s.generation, h.row.incarnation);
    auto& reference = run.references.at(h.row.reference);
    bool reusable = false;
    in(reusable);
    if (run.planted(Fault::resume_without_reference)) return;
    reference.state = reusable ? State::reusable : State::source_ready;
    for (auto& head : reference.heads) reference_fields(in, head);
  }
  if (in.left() != 0) throw InternalError("a snapshot holds more than was read from it");
}

}  // namespace

std::vector<std::byte> seal_snapshot(const SnapshotIdentity& identity, std::span<const std::byte> payload) {
  Writer out;
  out.bytes(kMagic, kMagicBytes);
  out(kSnapshotVersion);
  out(identity.model_sha256), out(identity.configuration), out(identity.profile), out(identity.request);
  out.list(payload.data(), payload.size());
  std::vector<std::byte> snapshot = out.take();
  Sha256 hash;
  hash.update(snapshot.data(), snapshot.size());
  const std::string checksum = hash.hex_digest();
  const auto* digits = reinterpret_cast<const std::byte*>(checksum.data());
  snapshot.insert(snapshot.end(), digits, digits + checksum.size());
  return snapshot;
}

std::span<const std::byte> open_snapshot(std::span<const std::byte> snapshot, const SnapshotIdentity& expected) {
  Reader in(snapshot);
  if (std::memcmp(in.take(kMagicBytes).data(), kMagic, kMagicBytes) != 0)
    throw FileError("snapshot: magic: these bytes are no snapshot of a request");
  std::uint32_t version = 0;
  in(version);
  if (version != kSnapshotVersion) {
    throw FileError("snapshot: version " + std::to_string(version) + " is not the version " + std::to_string(kSnapshotVersion) +
                    " that can be read");
  }
  const auto check = [&](const char* field, const std::string& wanted) {
    std::string found;
    in(found);
    if (found != wanted) throw FileError("snapshot: " + std::string(field) + " is " + found + ", here it is " + wanted);
  };
  check("model", expected.model_sha256);
  check("configuration", expected.configuration);
  check("profile", expected.profile);
  check("request", expected.request);
  std::size_t count = 0;
  const auto payload = in.list<std::byte>(count);
  if (in.left() != kChecksumBytes) {
    throw FileError("snapshot: length: " + std::to_string(in.left()) + " bytes after the payload, " + std::to_string(kChecksumBytes) +
                    " of checksum expected");
  }
  Sha256 hash;
  hash.update(snapshot.data(), snapshot.size() - kChecksumBytes);
  if (std::memcmp(hash.hex_digest().data(), snapshot.last(kChecksumBytes).data(), kChecksumBytes) != 0) {
    throw FileError("snapshot: checksum: the bytes have changed since they were written");
  }
  return payload;
}

template <class P>
SnapshotIdentity snapshot_identity(const RunContext<P>& run, const RequestState<P>& s) {
  return {run.model_sha256, run.config.canonical_json(), std::string(to_string(run.options.profile)),
          std::to_string(s.index) + " of trace " + run.trace.name + ", id " + std::to_string(s.request->id) + ", generation " +
              std::to_string(s.generation)};
}

template <class P>
void preempt(RunContext<P>& run, RequestState<P>& s) {
  give_up_rows(run, s);
  std::vector<std::byte> snapshot = seal_snapshot(snapshot_identity(run, s), payload_of(run, *s.held));
  run.counters.snapshot_bytes += static_cast<std::int64_t>(snapshot.size());
  ++run.counters.preemptions;
  if (s.held->row.reference >= 0) run.references.wipe(s.held->row.reference);
  release(run, s);
  s.snapshot = std::move(snapshot);
  s.phase = RequestState<P>::Phase::preempted;
}

template <class P>
void restore(RunContext<P>& run, RequestState<P>& s) {
  const auto payload = open_snapshot(s.snapshot, snapshot_identity(run, s));
  allocate_storage(run, s);
  read_payload(run, s, payload);
  s.snapshot.clear();
  s.phase = RequestState<P>::Phase::live;
  const bool between_rows = s.held->committed >= s.prompt_length && (s.held->row.position < 0 || s.held->row.finished);
  s.held->token_lost = between_rows && run.planted(Fault::resume_without_token);
}

#define LOOPGAUGE_INSTANTIATE(P)                                                                \
  template SnapshotIdentity snapshot_identity<P>(const RunContext<P>&, const RequestState<P>&); \
  template void preempt<P>(RunContext<P>&, RequestState<P>&);                                   \
  template void restore<P>(RunContext<P>&, RequestState<P>&);
LOOPGAUGE_FOR_EACH_PROFILE(LOOPGAUGE_INSTANTIATE)
#undef LOOPGAUGE_INSTANTIATE

}  // namespace loopgauge::reference
