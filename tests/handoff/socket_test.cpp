// SPDX-License-Identifier: Apache-2.0
// A handoff through a pair of sockets, and what the connection makes of an other end that ends, lies or sends garbage.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <future>

#include "harness/handoff/endpoint.hpp"
#include "harness/handoff/socket_transport.hpp"
#include "models/error.hpp"
#include "tests/handoff/handoff_fixture.hpp"
#include "tests/reference/executor/modes.hpp"

namespace loopgauge::test {
namespace {

using handoff::MemoryPlace;
using Bytes = std::vector<std::byte>;
constexpr std::chrono::milliseconds kSoon{2000};

struct Pair {
  Pair() {
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) throw std::runtime_error("socketpair failed");
  }
  int ends[2] = {-1, -1};  // owned by the connections that are made of them
};

const harness::RunIdentity kRun{"pd", "t0s0q0", "four", std::string(64, 'a'), std::string(64, 'b'), "declared"};

// What the two ends of a connection make of each other's greeting: empty when both agree.
std::array<std::string, 2> greet(harness::SocketConnection& a, harness::SocketConnection& b, MemoryPlace place_a = MemoryPlace::host, MemoryPlace place_b = MemoryPlace::host,
                                 const harness::RunIdentity& run_a = kRun, const harness::RunIdentity& run_b = kRun) {
  harness::say_hello(a, place_a, run_a);
  harness::say_hello(b, place_b, run_b);
  const auto heard = [](harness::SocketConnection& connection, MemoryPlace place, const harness::RunIdentity& run) -> std::string {
    try {
      harness::hear_hello(connection, place, run, kSoon);
    } catch (const handoff::HandoffError& error) {
      return error.what();
    }
    return {};
  };
  return {heard(a, place_a, run_a), heard(b, place_b, run_b)};
}

TEST(HandoffSocket, CarriesAHandoffWithEveryBit) {
  const Checkpoint checkpoint = tiny_checkpoint();
  const Trace trace = trace_of({request(0, 150, 3), request(1, 70, 2)});
  for (const char* text : {"t0s0q0", "t1s1q1"}) {
    const EffectiveConfig config = EffectiveConfig::resolve(switches(text), checkpoint.config);
    Pair pair;
    const auto to_receiver = harness::adopt_socket(pair.ends[0], getpid()), to_sender = harness::adopt_socket(pair.ends[1], getpid());
    const auto prefill = reference::make_reference_executor(checkpoint), decode = reference::make_reference_executor(checkpoint);
    RunOptions options;
    options.stage = Stage::prefill;
    prefill->begin(trace, config, options);
    options.stage = Stage::decode;
    options.record = RecordGroups::all();
    decode->begin(trace, config, options);
    EXPECT_EQ(greet(*to_receiver, *to_sender), (std::array<std::string, 2>{}));
    const auto out = harness::make_socket_sender(to_receiver, MemoryPlace::host);
    const auto in = harness::make_socket_receiver(to_sender, MemoryPlace::host);
    EXPECT_EQ(out->name(), "socket");
    harness::SenderEndpoint sender(*prefill->handoff_source(), *out, 1, {.partition_bytes = 900, .bytes_in_flight = 2000, .export_bytes = 3000});
    harness::ReceiverEndpoint receiver(*decode->handoff_target(), *in);
    for (const int request : {0, 1}) {
      sender.offer(request);
      prefill->submit({{{request, RowKind::prefill, 0, trace.requests[static_cast<std::size_t>(request)].prompt_length(), 1, 4}}});
      while (!sender.closed(request)) static_cast<void>(sender.step()), static_cast<void>(receiver.step());
      ASSERT_EQ(sender.outcome(request), handoff::Outcome::handed_over) << sender.reason(request);
      const int first = trace.requests[static_cast<std::size_t>(request)].prompt_length();
      for (int j = 0; j < trace.requests[static_cast<std::size_t>(request)].max_new_tokens; ++j)
        decode->submit({{{request, RowKind::decode, first + j, first + j + 1, 1, 4}}});
    }
    const RunRecord whole = run(checkpoint, trace, switches(text)), handed = decode->finish();
    for (std::size_t i = 0; i < 2; ++i) {
      EXPECT_EQ(handed.requests[i].logits.data, whole.requests[i].logits.data) << text;
      EXPECT_EQ(handed.requests[i].tokens, whole.requests[i].tokens) << text;
    }
    EXPECT_EQ(describe(handed.held_at_drain), "");
    EXPECT_EQ(describe(prefill->finish().held_at_drain), "");
  }
}

TEST(HandoffSocket, EndsThatMoveMemoryOfDifferentPlacesRefuseEachOther) {
  Pair pair;
  const auto a = harness::adopt_socket(pair.ends[0], getpid()), b = harness::adopt_socket(pair.ends[1], getpid());
  EXPECT_EQ(greet(*a, *b, MemoryPlace::host, MemoryPlace::device),
            (std::array<std::string, 2>{"handoff socket: the other side moves device memory, this one host memory",
                                        "handoff socket: the other side moves host memory, this one device memory"}));
}

TEST(HandoffSocket, EndsThatRunDifferentThingsRefuseEachOtherByTheField) {
  const struct {
    std::string harness::RunIdentity::*member;
    const char* name;
  } fields[] = {{&harness::RunIdentity::mode, "mode"},
                {&harness::RunIdentity::settings, "settings"},
                {&harness::RunIdentity::trace, "trace"},
                {&harness::RunIdentity::trace_sha256, "contents of the trace (SHA-256)"},
                {&harness::RunIdentity::model_sha256, "model (SHA-256)"},
                {&harness::RunIdentity::profile, "profile"}};
  for (const auto& [member, name] : fields) {
    Pair pair;
    const auto a = harness::adopt_socket(pair.ends[0], getpid()), b = harness::adopt_socket(pair.ends[1], getpid());
    harness::RunIdentity other = kRun;
    other.*member = "an\x1bother";
    const auto [here, there] = greet(*a, *b, MemoryPlace::host, MemoryPlace::host, kRun, other);
    EXPECT_EQ(here, "handoff socket: the two sides run different things: " + std::string(name) + " is 'an?other' there and '" + kRun.*member + "' here");
    EXPECT_NE(there.find(std::string(name) + " is '" + kRun.*member + "' there"), std::string::npos) << there;
  }
}

std::string hearing_error(harness::SocketConnection& connection, std::chrono::milliseconds at_most) {
  try {
    harness::hear_hello(connection, MemoryPlace::host, kRun, at_most);
  } catch (const Error& error) {
    return error.what();
  }
  return "heard";
}

TEST(HandoffSocket, AnEndThatSaysNothingOrSomethingElseFirstIsRefused) {
  Pair silent;
  const auto patient = harness::adopt_socket(silent.ends[0], getpid());
  EXPECT_NE(hearing_error(*patient, std::chrono::milliseconds(10)).find("says nothing"), std::string::npos);
  close(silent.ends[1]);
  EXPECT_NE(hearing_error(*patient, kSoon * 100).find("has ended before its first word"), std::string::npos) << "at once";

  Pair leaving;
  const auto told = harness::adopt_socket(leaving.ends[0], getpid());
  {
    const auto other = harness::adopt_socket(leaving.ends[1], getpid());
    harness::say_goodbye(*other, "because", kSoon);
  }
  EXPECT_NE(hearing_error(*told, kSoon).find("because"), std::string::npos);

  Pair eager;
  const auto a = harness::adopt_socket(eager.ends[0], getpid()), b = harness::adopt_socket(eager.ends[1], getpid());
  const auto out = harness::make_socket_sender(b, MemoryPlace::host);
  out->channel().send(Bytes(3));
  EXPECT_NE(hearing_error(*a, kSoon).find("does not begin with"), std::string::npos);

  // A first frame of the first version, which ended with the place.
  Pair old;
  const auto young = harness::adopt_socket(old.ends[0], getpid());
  const unsigned char frame[] = {1, 0, 0, 0, 16, 0, 0, 0, 'L', 'G', 'P', 'D', 'S', 'O', 'C', 'K', 1, 0, 0, 0, 0, 0, 0, 0};
  ASSERT_EQ(send(old.ends[1], frame, sizeof frame, MSG_NOSIGNAL), static_cast<ssize_t>(sizeof frame));
  EXPECT_EQ(hearing_error(*young, kSoon), "handoff socket: version is 1, here it is 3");
  close(old.ends[1]);
}

// A folder of its own, and a plain socket bound in it.
struct Place {
  Place() { std::filesystem::create_directories(folder); }
  ~Place() { std::filesystem::remove_all(folder); }
  static int bind_at(const std::filesystem::path& path) {
    const int descriptor = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path.string().copy(address.sun_path, sizeof address.sun_path - 1);
    if (bind(descriptor, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) throw std::runtime_error("bind failed");
    return descriptor;
  }
  void await_path() const {
    for (int i = 0; i < 2000 && !std::filesystem::exists(path); ++i) usleep(1000);
  }
  std::size_t entries() const {
    return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator()));
  }
  const std::filesystem::path folder = std::filesystem::temp_directory_path() / ("handoff_socket_" + std::to_string(getpid()));
  const std::filesystem::path path = folder / "socket", lock = folder / "socket.lock";
};

// Two that come at the same time: the second one does not wait for a lease, it is told.
TEST(HandoffSocket, ASecondSenderLearnsAtOnceThatAnotherOneIsServed) {
  const Place place;
  auto waiting = std::async(std::launch::async, [&] {
    place.await_path();
    const auto first = harness::connect_handoffs(place.path, kSoon);
    std::string answer;
    try {
      const auto second = harness::connect_handoffs(place.path, std::chrono::milliseconds(0));
      harness::say_hello(*second, MemoryPlace::host, kRun);
      answer = hearing_error(*second, kSoon * 100);
    } catch (const FileError& error) {
      answer = error.what();  // the path has gone already
    }
    return std::pair(first, answer);
  });
  const auto accepted = harness::accept_handoffs(place.path, kSoon * 5);
  const auto [first, answer] = waiting.get();
  EXPECT_TRUE(answer.find("ended before its first word") != std::string::npos || answer.find("no decode side waits there") != std::string::npos) << answer;
  EXPECT_EQ(greet(*accepted, *first), (std::array<std::string, 2>{}));
}

// A socket that is closed may belong to a process that still has writes under way.
TEST(HandoffSocket, APeerIsLostWithItsProcessOrItsGoodbye) {
  Pair pair;
  const auto living = harness::adopt_socket(pair.ends[0], getpid());
  const auto in = harness::make_socket_receiver(living, MemoryPlace::host);
  close(pair.ends[1]);
  static_cast<void>(in->channel().receive());
  EXPECT_FALSE(in->channel().peer_lost()) << "its process lives and has said nothing";

  Pair farewell;
  const auto here = harness::adopt_socket(farewell.ends[0], getpid());
  const auto receiver = harness::make_socket_receiver(here, MemoryPlace::host);
  {
    const auto there = harness::adopt_socket(farewell.ends[1], getpid());
    const auto sender = harness::make_socket_sender(there, MemoryPlace::host);
    harness::say_goodbye(*there, "because", kSoon);
  }
  static_cast<void>(receiver->channel().receive());
  EXPECT_TRUE(receiver->channel().peer_lost());
  EXPECT_EQ(harness::goodbye_reason(*here), "because");

  Pair killed;
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    close(killed.ends[0]);
    pause();
    _exit(0);
  }
  close(killed.ends[1]);
  const auto watching = harness::adopt_socket(killed.ends[0], child);
  const auto watched = harness::make_socket_receiver(watching, MemoryPlace::host);
  static_cast<void>(watched->channel().receive());
  EXPECT_FALSE(watched->channel().peer_lost());
  kill(child, SIGKILL);
  for (int i = 0; i < 2000 && !watched->channel().peer_lost(); ++i) {
    static_cast<void>(watched->channel().receive());
    usleep(1000);
  }
  EXPECT_TRUE(watched->channel().peer_lost());
  EXPECT_FALSE(harness::goodbye_came(*watching));
  waitpid(child, nullptr, 0);
}

std::string accept_error(const std::filesystem::path& path, std::chrono::milliseconds at_most) {
  try {
    harness::accept_handoffs(path, at_most);
  } catch (const FileError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(HandoffSocket, ASecondReceiverAtAPathIsRefusedAndTheFirstGoesOn) {
  const Place place;
  auto first = std::async(std::launch::async, [&] { return harness::accept_handoffs(place.path, kSoon * 5); });
  place.await_path();
  EXPECT_NE(accept_error(place.path, kSoon).find("another process waits there already"), std::string::npos);
  EXPECT_TRUE(std::filesystem::exists(place.path));
  EXPECT_EQ(first.wait_for(std::chrono::milliseconds(20)), std::future_status::timeout);
  EXPECT_NE(harness::connect_handoffs(place.path, kSoon), nullptr);
  EXPECT_NE(first.get(), nullptr);
  EXPECT_EQ(place.entries(), 0u);
}

TEST(HandoffSocket, ASocketLeftBehindIsReplacedAndOneThatCameLaterStays) {
  const Place place;
  close(Place::bind_at(place.path));
  std::ofstream(place.lock).flush();  // what a killed process leaves
  EXPECT_NE(accept_error(place.path, std::chrono::milliseconds(10)).find("no prefill side has come"), std::string::npos);
  EXPECT_EQ(place.entries(), 0u);

  auto waiting = std::async(std::launch::async, [&] { return accept_error(place.path, std::chrono::milliseconds(500)); });
  place.await_path();
  const std::filesystem::path other = place.folder / "other";
  const int descriptor = Place::bind_at(other);
  std::filesystem::rename(other, place.path);
  EXPECT_NE(waiting.get().find("no prefill side has come"), std::string::npos);
  EXPECT_TRUE(std::filesystem::is_socket(place.path)) << "of somebody else";
  close(descriptor);
  std::filesystem::remove(place.path);

  std::ofstream(place.lock) << "mine";
  EXPECT_NE(accept_error(place.path, kSoon).find("not a lock"), std::string::npos);
  EXPECT_TRUE(std::filesystem::exists(place.lock));
}

TEST(HandoffSocket, AWriteOutsideWhatIsExposedFailsAndTouchesNothing) {
  Pair pair;
  const auto a = harness::adopt_socket(pair.ends[0], getpid()), b = harness::adopt_socket(pair.ends[1], getpid());
  const auto out = harness::make_socket_sender(a, MemoryPlace::host);
  const auto in = harness::make_socket_receiver(b, MemoryPlace::host);
  std::vector<std::byte> memory(64, std::byte{7}), bytes(32, std::byte{1});
  const handoff::Destination destination = in->expose({memory.data(), 40, -1});
  const auto write = [&](std::uint64_t ticket, const handoff::Destination& to, std::uint64_t offset) {
    out->write(ticket, {bytes.data(), bytes.size(), -1}, to, offset);
    std::vector<handoff::WriteResult> results;
    for (int i = 0; i < 100 && results.empty(); ++i) {
      static_cast<void>(in->channel().receive());
      static_cast<void>(out->channel().receive());
      results = out->ended();
    }
    return results.size() == 1 && results[0].ticket == ticket && results[0].success;
  };
  EXPECT_TRUE(write(1, destination, 8));
  EXPECT_FALSE(write(2, destination, 9)) << "over the end";
  EXPECT_FALSE(write(3, {destination.address, 1000}, 40)) << "a capacity that the sender makes up";
  EXPECT_FALSE(write(4, {destination.address + 1, 40}, 0)) << "nowhere";
  in->withdraw(destination);
  EXPECT_FALSE(write(5, destination, 0)) << "withdrawn";
  for (std::size_t i = 0; i < memory.size(); ++i) EXPECT_EQ(memory[i], i >= 8 && i < 40 ? std::byte{1} : std::byte{7}) << i;
}

TEST(HandoffSocket, GarbageIsRefusedWhateverItIs) {
  std::mt19937 generator(17);
  Bytes good;
  {
    Pair pair;
    const auto a = harness::adopt_socket(pair.ends[0], getpid());
    harness::say_hello(*a, MemoryPlace::host, kRun);
    const auto out = harness::make_socket_sender(a, MemoryPlace::host);
    std::vector<std::byte> bytes(100, std::byte{3});
    out->write(1, {bytes.data(), bytes.size(), -1}, {1, 100}, 0);
    handoff::Message message;
    message.kind = handoff::MessageKind::writes_ended;
    out->channel().send(handoff::serialize(message));
    good.resize(4096);
    good.resize(static_cast<std::size_t>(recv(pair.ends[1], good.data(), good.size(), MSG_DONTWAIT)));
    close(pair.ends[1]);
  }
  for (int round = 0; round < 2000; ++round) {
    Bytes bytes = good;
    for (std::uint32_t i = 0; i <= generator() % 4; ++i) mutate(bytes, generator);
    Pair pair;
    const auto b = harness::adopt_socket(pair.ends[1], getpid());
    const auto in = harness::make_socket_receiver(b, MemoryPlace::host);
    std::vector<std::byte> memory(100);
    static_cast<void>(in->expose({memory.data(), memory.size(), -1}));
    ASSERT_EQ(send(pair.ends[0], bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
    try {
      harness::hear_hello(*b, MemoryPlace::host, kRun, std::chrono::milliseconds(0));
      for (int i = 0; i < 4; ++i) {
        if (const auto message = in->channel().receive()) static_cast<void>(handoff::parse_message(*message));
      }
    } catch (const Error&) {  // of what was said, or that nothing was
    }
    close(pair.ends[0]);
  }
}

}  // namespace
}  // namespace loopgauge::test
