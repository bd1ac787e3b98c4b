// SPDX-License-Identifier: Apache-2.0
#include "harness/handoff/socket_transport.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "harness/interrupt.hpp"
#include "harness/io/path_lock.hpp"
#include "harness/provenance.hpp"
#include "models/error.hpp"
#include "models/handoff/bytes.hpp"
#include "optimized/device_copies.hpp"

namespace loopgauge::harness {
namespace {

using Bytes = std::vector<std::byte>;
using Clock = std::chrono::steady_clock;
using handoff::ByteReader;
using handoff::ByteWriter;
using handoff::HandoffError;
using handoff::MemoryPlace;
using handoff::printable;

constexpr std::string_view kMagic = "LGPDSOCK";
constexpr std::uint32_t kVersion = 3;
constexpr std::size_t kHeaderBytes = 8;
constexpr std::uint32_t kMaximumTextBytes = 4096;  // of a text in the first frame
constexpr std::size_t kMaximumFrameBytes = kMostPartitionBytes + 24;  // of data: ticket, address and offset before the bytes
static_assert(kMaximumFrameBytes == std::size_t{1} << 27);
constexpr std::chrono::milliseconds kPause{1};

enum class FrameKind : std::uint32_t {
  hello = 1,      // both, once
  message = 2,    // both: a control message
  data = 3,       // sender, host memory: bytes of a write
  written = 4,    // receiver, host memory: a write has ended
  exposed = 5,    // receiver, device memory: where an address lies
  withdrawn = 6,  // receiver, device memory
  goodbye = 7,    // both, last
};

// Owned file descriptor.
class Descriptor {
 public:
  explicit Descriptor(int value = -1) : value_(value) {}
  ~Descriptor() {
    if (value_ >= 0) close(value_);
  }
  Descriptor(Descriptor&& other) noexcept : value_(std::exchange(other.value_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(value_, other.value_);
    return *this;
  }
  int get() const { return value_; }
  int release() { return std::exchange(value_, -1); }

 private:
  int value_;
};

// In the order of the first frame.
constexpr std::pair<std::string_view, std::string RunIdentity::*> kIdentityFields[] = {
    {"mode", &RunIdentity::mode},
    {"settings", &RunIdentity::settings},
    {"trace", &RunIdentity::trace},
    {"contents of the trace (SHA-256)", &RunIdentity::trace_sha256},
    {"model (SHA-256)", &RunIdentity::model_sha256},
    {"profile", &RunIdentity::profile},
};

bool readable(int descriptor) {
  pollfd wait{descriptor, POLLIN, 0};
  return poll(&wait, 1, 0) > 0;
}

std::string error_text(int error) { return std::strerror(error); }

}  // namespace

class SocketConnection {
 public:
  struct Frame {
    FrameKind kind;
    Bytes body;
  };

  SocketConnection(int descriptor, int peer) : socket_(descriptor) {
    const int flags = fcntl(descriptor, F_GETFL);
    if (flags < 0 || fcntl(descriptor, F_SETFL, flags | O_NONBLOCK) < 0) throw FileError("handoff socket: " + error_text(errno));
    process_ = Descriptor(static_cast<int>(syscall(SYS_pidfd_open, peer, 0)));
    // A process that has ended since is as good as one that ends now.
    if (process_.get() < 0 && errno == ESRCH) process_gone_ = true;
    if (process_.get() < 0 && errno != ESRCH) {
      throw UnsupportedError("handoff socket: process " + std::to_string(peer) + " at its other end cannot be watched (" + error_text(errno) +
                             "): both must see each other's processes, and Linux must be 5.3 or newer");
    }
  }

  void send(FrameKind kind, std::span<const std::byte> first, std::span<const std::byte> second = {}) {
    ByteWriter header;
    header.integer(static_cast<std::uint32_t>(kind));
    header.integer(static_cast<std::uint32_t>(first.size() + second.size()));
    out_.insert(out_.end(), header.written().begin(), header.written().end());
    out_.insert(out_.end(), first.begin(), first.end());
    out_.insert(out_.end(), second.begin(), second.end());
    pump();
  }

  // Sends and receives what can be now.
  void pump() {
    while (!closed_ && sent_ < out_.size()) {
      const ssize_t count = ::send(socket_.get(), out_.data() + sent_, out_.size() - sent_, MSG_NOSIGNAL);
      if (count < 0 && (errno == EAGAIN || errno == EINTR)) break;
      if (count < 0) {
        closed_ = true;
        break;
      }
      sent_ += static_cast<std::size_t>(count);
    }
    if (closed_ || sent_ == out_.size()) out_.clear(), sent_ = 0;
    // What came before an end that is already known is still read.
    for (bool more = true; more && !end_;) {
      std::byte buffer[65536];
      const ssize_t count = recv(socket_.get(), buffer, sizeof buffer, 0);
      if (count > 0) {
        in_.insert(in_.end(), buffer, buffer + count);
      } else if (count == 0 || (errno != EAGAIN && errno != EINTR)) {
        end_ = closed_ = true;
      } else {
        more = errno == EINTR;
      }
    }
    parse();
  }

  std::deque<Frame>& frames() { return frames_; }
  bool all_sent() const { return out_.empty(); }
  bool ended() const { return end_; }
  bool goodbye_came() const { return goodbye_; }
  const std::string& goodbye_reason() const { return reason_; }

  bool peer_lost() const {
    if (!end_) return false;
    if (!process_gone_ && process_.get() >= 0) process_gone_ = readable(process_.get());
    return goodbye_ || process_gone_;
  }

 private:
  void parse() {
    std::size_t at = 0;
    while (in_.size() - at >= kHeaderBytes) {
      ByteReader header(std::span<const std::byte>(in_).subspan(at, kHeaderBytes), "frame of a handoff socket");
      const auto kind = header.integer<std::uint32_t>(), length = header.integer<std::uint32_t>();
      if (kind < 1 || kind > 7) throw HandoffError("frame of a handoff socket: kind " + std::to_string(kind) + " is not within 1..7");
      if (length > kMaximumFrameBytes) {
        throw HandoffError("frame of a handoff socket: " + std::to_string(length) + " bytes are more than " + std::to_string(kMaximumFrameBytes));
      }
      if (in_.size() - at - kHeaderBytes < length) break;
      const auto begin = in_.begin() + static_cast<std::ptrdiff_t>(at + kHeaderBytes);
      Frame frame{static_cast<FrameKind>(kind), Bytes(begin, begin + length)};
      at += kHeaderBytes + length;
      if (frame.kind == FrameKind::goodbye) {
        goodbye_ = true;
        reason_ = printable(std::string(reinterpret_cast<const char*>(frame.body.data()), frame.body.size()));
      } else {
        frames_.push_back(std::move(frame));
      }
    }
    in_.erase(in_.begin(), in_.begin() + static_cast<std::ptrdiff_t>(at));
  }

  Descriptor socket_, process_;
  Bytes out_, in_;
  std::size_t sent_ = 0;                         // of out_
  std::deque<Frame> frames_;
  bool closed_ = false;                          // nothing can be sent any more
  bool end_ = false;                             // nothing more comes
  mutable bool process_gone_ = false;
  bool goodbye_ = false;
  std::string reason_;
};

namespace {

// What both ends do alike: control messages.
class SocketChannel final : public handoff::Channel {
 public:
  explicit SocketChannel(std::shared_ptr<SocketConnection> connection) : connection_(std::move(connection)) {}
  void send(std::span<const std::byte> message) override { connection_->send(FrameKind::message, message); }
  std::optional<Bytes> receive() override {
    pump();
    if (messages_.empty()) return std::nullopt;
    Bytes message = std::move(messages_.front());
    messages_.pop_front();
    return message;
  }
  bool peer_lost() const override { return messages_.empty() && connection_->frames().empty() && connection_->peer_lost(); }

  SocketConnection& connection() { return *connection_; }
  // Called for every frame that is no message before later messages are seen.
  std::function<void(const SocketConnection::Frame&)> on_frame;

 private:
  void pump() {
    connection_->pump();
    auto& frames = connection_->frames();
    while (!frames.empty()) {
      SocketConnection::Frame frame = std::move(frames.front());
      frames.pop_front();
      if (frame.kind == FrameKind::message) {
        messages_.push_back(std::move(frame.body));
      } else if (on_frame) {
        on_frame(frame);
      }
    }
  }

  std::shared_ptr<SocketConnection> connection_;
  std::deque<Bytes> messages_;
};

class SocketSender final : public handoff::SenderTransport {
 public:
  SocketSender(std::shared_ptr<SocketConnection> connection, MemoryPlace place) : channel_(std::move(connection)), place_(place) {
    channel_.on_frame = [this](const SocketConnection::Frame& frame) { take(frame); };
    if (place == MemoryPlace::device) {
      copies_ = optimized::make_device_copies();
      opened_ = optimized::make_opened_device_memory();
    }
  }
  // No copy may be under way when what it writes to is closed.
  ~SocketSender() override { copies_.reset(); }

  std::string_view name() const override { return place_ == MemoryPlace::host ? "socket" : "ipc"; }
  handoff::Channel& channel() override { return channel_; }

  void write(std::uint64_t ticket, const handoff::Memory& source, const handoff::Destination& destination, std::uint64_t offset) override {
    const bool fits = offset <= destination.capacity && source.bytes <= destination.capacity - offset;
    if (!fits || source.on_host() != (place_ == MemoryPlace::host)) {
      ended_.push_back({ticket, false});
    } else if (place_ == MemoryPlace::host) {
      ByteWriter head;
      head.integer(ticket);
      head.integer(destination.address);
      head.integer(offset);
      channel_.connection().send(FrameKind::data, head.written(), {source.data, source.bytes});
      under_way_.insert(ticket);
    } else {
      write_to_device(ticket, source, destination, offset);
    }
  }

  std::vector<handoff::WriteResult> ended() override {
    if (place_ == MemoryPlace::device) {
      for (const handoff::WriteResult& result : copies_->ended()) end_device_write(result);
    } else if (channel_.peer_lost()) {
      for (const std::uint64_t ticket : std::exchange(under_way_, {})) ended_.push_back({ticket, false});
    }
    return std::exchange(ended_, {});
  }

 private:
  void take(const SocketConnection::Frame& frame) {
    ByteReader in(frame.body, "frame of a handoff socket");
    switch (frame.kind) {
      case FrameKind::written: {
        const auto ticket = in.integer<std::uint64_t>();
        const bool success = in.integer<std::uint8_t>() != 0;
        if (under_way_.erase(ticket) > 0) ended_.push_back({ticket, success});
        return;
      }
      case FrameKind::exposed: {
        const auto address = in.integer<std::uint64_t>();
        optimized::DeviceMemoryName& name = exposed_[address];
        std::ranges::copy(in.take(name.handle.size()), name.handle.begin());
        std::ranges::copy(in.take(name.device.size()), name.device.begin());
        name.offset = in.integer<std::uint64_t>();
        name.bytes = in.integer<std::uint64_t>();
        return;
      }
      case FrameKind::withdrawn:
        exposed_.erase(in.integer<std::uint64_t>());
        return;
      default:
        throw HandoffError("frame of a handoff socket: kind " + std::to_string(static_cast<std::uint32_t>(frame.kind)) + " does not come from a receiver");
    }
  }

  void write_to_device(std::uint64_t ticket, const handoff::Memory& source, const handoff::Destination& destination, std::uint64_t offset) {
    const auto found = exposed_.find(destination.address);
    if (found == exposed_.end() || found->second.bytes < offset || found->second.bytes - offset < source.bytes) {
      ended_.push_back({ticket, false});
      return;
    }
    handoff::Memory target;
    try {
      target = opened_->open(found->second);
    } catch (const Error&) {  // the receiver is gone, or this process does not see its device
      ended_.push_back({ticket, false});
      return;
    }
    // What is open from here on is closed when the copies report the write, also one that could not be begun.
    device_writes_[ticket] = found->second;
    copies_->begin(ticket, source, {target.data + offset, source.bytes, target.device});
  }

  // What the last write under way used is closed before that write is reported: then the receiver may free it.
  void end_device_write(const handoff::WriteResult& result) {
    const auto write = device_writes_.find(result.ticket);
    opened_->close(write->second);
    device_writes_.erase(write);
    ended_.push_back(result);
  }

  SocketChannel channel_;
  const MemoryPlace place_;
  std::set<std::uint64_t> under_way_;                                   // host memory
  std::map<std::uint64_t, optimized::DeviceMemoryName> exposed_;        // by address
  std::map<std::uint64_t, optimized::DeviceMemoryName> device_writes_;  // by ticket
  std::unique_ptr<optimized::OpenedDeviceMemory> opened_;
  std::unique_ptr<optimized::DeviceCopies> copies_;
  std::vector<handoff::WriteResult> ended_;
};

class SocketReceiver final : public handoff::ReceiverTransport {
 public:
  SocketReceiver(std::shared_ptr<SocketConnection> connection, MemoryPlace place) : channel_(std::move(connection)), place_(place) {
    channel_.on_frame = [this](const SocketConnection::Frame& frame) { take(frame); };
  }
  handoff::Channel& channel() override { return channel_; }

  handoff::Destination expose(const handoff::Memory& memory) override {
    const std::uint64_t address = ++addresses_;
    if (place_ == MemoryPlace::device && memory.bytes > 0) {
      const optimized::DeviceMemoryName name = optimized::name_device_memory(memory);
      ByteWriter frame;
      frame.integer(address);
      frame.bytes(name.handle);
      frame.bytes(name.device);
      frame.integer(name.offset);
      frame.integer(name.bytes);
      channel_.connection().send(FrameKind::exposed, frame.written());
    }
    exposed_[address] = memory;
    return {address, memory.bytes};
  }

  void withdraw(const handoff::Destination& destination) override {
    if (exposed_.erase(destination.address) == 0) throw InternalError("memory is withdrawn that was not exposed");
    if (place_ == MemoryPlace::host) return;
    ByteWriter frame;
    frame.integer(destination.address);
    channel_.connection().send(FrameKind::withdrawn, frame.written());
  }

 private:
  void take(const SocketConnection::Frame& frame) {
    if (frame.kind != FrameKind::data || place_ != MemoryPlace::host) {
      throw HandoffError("frame of a handoff socket: kind " + std::to_string(static_cast<std::uint32_t>(frame.kind)) + " does not come from a sender of " +
                         (place_ == MemoryPlace::host ? "host" : "device") + " memory");
    }
    ByteReader in(frame.body, "frame of a handoff socket");
    const auto ticket = in.integer<std::uint64_t>(), address = in.integer<std::uint64_t>(), offset = in.integer<std::uint64_t>();
    const auto bytes = in.take(in.left());
    const auto found = exposed_.find(address);
    const bool fits = found != exposed_.end() && offset <= found->second.bytes && bytes.size() <= found->second.bytes - offset;
    if (fits && !bytes.empty()) std::memcpy(found->second.data + offset, bytes.data(), bytes.size());
    ByteWriter answer;
    answer.integer(ticket);
    answer.integer(static_cast<std::uint8_t>(fits ? 1 : 0));
    channel_.connection().send(FrameKind::written, answer.written());
  }

  SocketChannel channel_;
  const MemoryPlace place_;
  std::map<std::uint64_t, handoff::Memory> exposed_;  // by address
  std::uint64_t addresses_ = 0;
};

sockaddr_un address_of(const std::filesystem::path& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string text = path.string();
  if (text.empty() || text.size() >= sizeof address.sun_path) {
    throw FileError("--socket " + text + ": the path of a Unix socket has 1 to " + std::to_string(sizeof address.sun_path - 1) + " bytes");
  }
  std::memcpy(address.sun_path, text.c_str(), text.size());
  return address;
}

FileError socket_error(const std::filesystem::path& path, const std::string& what) { return FileError("--socket " + path.string() + ": " + what); }

Descriptor new_socket(const std::filesystem::path& path) {
  Descriptor descriptor(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (descriptor.get() < 0) throw socket_error(path, error_text(errno));
  return descriptor;
}

bool connects(const Descriptor& descriptor, const sockaddr_un& address) {
  return connect(descriptor.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
}

bool same_file(const struct stat& a, const struct stat& b) { return a.st_dev == b.st_dev && a.st_ino == b.st_ino; }

// Removes the path of a bound socket, unless something else lies there by then.
class BoundPath {
 public:
  explicit BoundPath(const std::filesystem::path& path) : path_(path), known_(lstat(path.c_str(), &bound_) == 0) {}
  ~BoundPath() {
    struct stat there{};
    if (known_ && lstat(path_.c_str(), &there) == 0 && same_file(bound_, there)) unlink(path_.c_str());
  }
  BoundPath(const BoundPath&) = delete;
  BoundPath& operator=(const BoundPath&) = delete;

 private:
  const std::filesystem::path path_;
  struct stat bound_{};
  const bool known_;
};

void require_folder(const std::filesystem::path& path) {
  const std::filesystem::path folder = path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
  std::error_code ignored;
  if (!std::filesystem::is_directory(folder, ignored)) throw socket_error(path, "folder " + folder.string() + " does not exist");
}

int process_at(const Descriptor& descriptor, const std::filesystem::path& path) {
  ucred peer{};
  socklen_t length = sizeof peer;
  if (getsockopt(descriptor.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) throw socket_error(path, error_text(errno));
  return peer.pid;
}

}  // namespace

std::shared_ptr<SocketConnection> adopt_socket(int descriptor, int peer) { return std::make_shared<SocketConnection>(descriptor, peer); }

std::shared_ptr<SocketConnection> accept_handoffs(const std::filesystem::path& path, std::chrono::milliseconds at_most) {
  const sockaddr_un address = address_of(path);
  require_folder(path);
  const PathLock lock(path, process_text(), "--socket " + path.string(), "another process waits there already");
  const Descriptor listening = new_socket(path);
  struct stat existing{};
  if (lstat(path.c_str(), &existing) == 0) {
    if (!S_ISSOCK(existing.st_mode)) throw socket_error(path, "is there already and no socket");
    unlink(path.c_str());  // left behind: whoever waits at one holds the lock
  }
  if (bind(listening.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) throw socket_error(path, error_text(errno));
  const BoundPath bound(path);
  if (listen(listening.get(), 1) != 0) throw socket_error(path, error_text(errno));
  const auto end = Clock::now() + at_most;
  while (!readable(listening.get())) {
    throw_if_interrupted();
    if (Clock::now() > end) throw socket_error(path, "no prefill side has come (loopgauge pd send)");
    std::this_thread::sleep_for(kPause);
  }
  Descriptor accepted(accept4(listening.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (accepted.get() < 0) throw socket_error(path, error_text(errno));
  const int peer = process_at(accepted, path);
  return std::make_shared<SocketConnection>(accepted.release(), peer);
}

std::shared_ptr<SocketConnection> connect_handoffs(const std::filesystem::path& path, std::chrono::milliseconds at_most) {
  const sockaddr_un address = address_of(path);
  const auto end = Clock::now() + at_most;
  for (;;) {
    Descriptor descriptor = new_socket(path);
    if (connects(descriptor, address)) {
      const int peer = process_at(descriptor, path);
      return std::make_shared<SocketConnection>(descriptor.release(), peer);
    }
    const int error = errno;
    if (error != ENOENT && error != ECONNREFUSED && error != EINTR) throw socket_error(path, error_text(error));
    // What no decode side can make good by coming.
    struct stat existing{};
    if (stat(path.c_str(), &existing) == 0 && !S_ISSOCK(existing.st_mode)) throw socket_error(path, "is no socket");
    require_folder(path);
    throw_if_interrupted();
    if (Clock::now() > end) throw socket_error(path, "no decode side waits there (loopgauge pd serve)");
    std::this_thread::sleep_for(kPause);
  }
}

std::unique_ptr<handoff::SenderTransport> make_socket_sender(std::shared_ptr<SocketConnection> connection, MemoryPlace place) {
  return std::make_unique<SocketSender>(std::move(connection), place);
}

std::unique_ptr<handoff::ReceiverTransport> make_socket_receiver(std::shared_ptr<SocketConnection> connection, MemoryPlace place) {
  return std::make_unique<SocketReceiver>(std::move(connection), place);
}

void say_hello(SocketConnection& connection, MemoryPlace place, const RunIdentity& identity) {
  ByteWriter hello;
  hello.text(kMagic);
  hello.integer(kVersion);
  hello.integer(static_cast<std::uint32_t>(place));
  for (const auto& [_, member] : kIdentityFields) {
    const std::string& text = identity.*member;
    if (text.size() > kMaximumTextBytes) throw InternalError("the identity of a run is longer than its frame");
    hello.integer(static_cast<std::uint32_t>(text.size()));
    hello.text(text);
  }
  connection.send(FrameKind::hello, hello.written());
}

void hear_hello(SocketConnection& connection, MemoryPlace place, const RunIdentity& identity, std::chrono::milliseconds at_most) {
  const auto end = Clock::now() + at_most;
  for (connection.pump(); connection.frames().empty(); connection.pump()) {
    throw_if_interrupted();
    if (connection.goodbye_came() && !connection.goodbye_reason().empty()) throw FileError("handoff socket: the other side has ended: " + connection.goodbye_reason());
    if (connection.ended()) throw FileError("handoff socket: the other side has ended before its first word (a decode side serves the prefill side that came first and no other)");
    if (Clock::now() > end) throw FileError("handoff socket: the other side says nothing");
    std::this_thread::sleep_for(kPause);
  }
  const SocketConnection::Frame frame = std::move(connection.frames().front());
  connection.frames().pop_front();
  ByteReader in(frame.body, "first frame of a handoff socket");
  if (frame.kind != FrameKind::hello || in.text(kMagic.size()) != kMagic) throw HandoffError("handoff socket: the other end does not begin with " + std::string(kMagic));
  const auto version = in.integer<std::uint32_t>();
  if (version != kVersion) throw HandoffError("handoff socket: version is " + std::to_string(version) + ", here it is " + std::to_string(kVersion));
  if (const auto other = in.integer<std::uint32_t>(); other != static_cast<std::uint32_t>(place)) {
    const auto word = [](bool device) { return std::string(device ? "device" : "host"); };
    throw HandoffError("handoff socket: the other side moves " + word(other == 1) + " memory, this one " + word(place == MemoryPlace::device) + " memory");
  }
  for (const auto& [name, member] : kIdentityFields) {
    const auto length = in.integer<std::uint32_t>();
    if (length > kMaximumTextBytes) throw HandoffError("first frame of a handoff socket: " + std::string(name) + " has " + std::to_string(length) + " bytes");
    const std::string other(in.text(length));
    if (other != identity.*member)
      throw HandoffError("handoff socket: the two sides run different things: " + std::string(name) + " is '" + printable(other) + "' there and '" + identity.*member + "' here");
  }
  if (in.left() != 0) throw HandoffError("first frame of a handoff socket: " + std::to_string(in.left()) + " bytes follow its last field");
}

void say_goodbye(SocketConnection& connection, const std::string& reason, std::chrono::milliseconds at_most) {
  connection.send(FrameKind::goodbye, std::as_bytes(std::span(reason)));
  const auto end = Clock::now() + at_most;
  while (!connection.all_sent() && Clock::now() < end) {
    connection.pump();
    std::this_thread::sleep_for(kPause);
  }
}

bool goodbye_came(const SocketConnection& connection) { return connection.goodbye_came(); }
std::string goodbye_reason(const SocketConnection& connection) { return connection.goodbye_reason(); }

}  // namespace loopgauge::harness
