// SPDX-License-Identifier: Apache-2.0
// The two sides in two processes of one host. Control messages go over a Unix socket; regions in host memory go over it too ("socket"), regions in
// device memory are written by the sender into memory that the receiver names (CUDA IPC, "ipc"). Frames: models/handoff/README.md.
//
// A process that is gone: its end of the socket is closed, and it has said goodbye, after its last write, or the kernel has ended it. Only then does
// peer_lost() hold, because a process that is being killed may have writes under way when its socket is already closed.
#pragma once

#include <chrono>
#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>

#include "models/handoff/transfer.hpp"

namespace loopgauge::harness {

class SocketConnection;

// Of one partition that goes over a socket.
inline constexpr std::size_t kMostPartitionBytes = (std::size_t{1} << 27) - 24;

// Waits for one sender, for at most so long. The path is made for it and removed; a socket that a process left behind is replaced. Beside it lies
// PATH.lock for so long: where another process has it locked, that one waits there and is left alone. Throws FileError naming the path.
std::shared_ptr<SocketConnection> accept_handoffs(const std::filesystem::path& path, std::chrono::milliseconds at_most);
// Connects to a receiver, which may come later, within so long. Throws FileError naming the path, at once where it is no socket or
// its folder does not exist.
std::shared_ptr<SocketConnection> connect_handoffs(const std::filesystem::path& path, std::chrono::milliseconds at_most);
// Of a connected pair of sockets, whose process is `peer`.
std::shared_ptr<SocketConnection> adopt_socket(int descriptor, int peer);

// What a side is about to run. Both must run the same, or one waits for what the other never does.
struct RunIdentity {
  std::string mode;          // of the plan, as in a case id
  std::string settings;      // the case id's second part
  std::string trace;         // name
  std::string trace_sha256;  // of everything in it
  std::string model_sha256;
  std::string profile;       // of the arithmetic: bits made by one and continued by another are of neither
  bool operator==(const RunIdentity&) const = default;
};

// The first frame, in which every side says what it runs and where its regions lie: before anything else, and before a transport is made.
void say_hello(SocketConnection& connection, handoff::MemoryPlace place, const RunIdentity& identity);
// Waits, at most so long, for the other side's and compares. Throws HandoffError naming the field in which they differ, and FileError when the other
// side has ended or says nothing.
void hear_hello(SocketConnection& connection, handoff::MemoryPlace place, const RunIdentity& identity, std::chrono::milliseconds at_most);

// Of a connection whose greetings have been exchanged, over memory of that place.
std::unique_ptr<handoff::SenderTransport> make_socket_sender(std::shared_ptr<SocketConnection> connection, handoff::MemoryPlace place);
std::unique_ptr<handoff::ReceiverTransport> make_socket_receiver(std::shared_ptr<SocketConnection> connection, handoff::MemoryPlace place);

// Tells the other side that nothing more comes, and why where something is wrong. No write of this side may be under way. Waits, at most so long,
// until it has left.
void say_goodbye(SocketConnection& connection, const std::string& reason, std::chrono::milliseconds at_most);
// The other side's: that it came, and its reason.
bool goodbye_came(const SocketConnection& connection);
std::string goodbye_reason(const SocketConnection& connection);

}  // namespace loopgauge::harness
