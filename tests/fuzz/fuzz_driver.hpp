// SPDX-License-Identifier: Apache-2.0
// Fuzzing of a reader, with and without libFuzzer. A target defines
//
//   void fuzz_one_input(std::span<const std::uint8_t> bytes);          // must return or throw loopgauge::Error; anything else is a finding
//   std::vector<std::vector<std::uint8_t>> fuzz_seeds();               // small valid inputs
//
// and its main is one line:
//
//   int main(int argc, char** argv) { return loopgauge::fuzz::fuzz_main(argc, argv, fuzz_seeds(), fuzz_one_input); }
//
// Built with LOOPGAUGE_LIBFUZZER the same target runs under libFuzzer instead (LOOPGAUGE_FUZZ_ENTRY below provides either entry point).
//
// The standalone driver mutates the seeds with a fixed generator, keeps what it has made in a small pool, and runs for a time:
//   --seconds N   how long (default 60)          --seed N      of the generator (default 1)
//   --runs N      stop after N inputs instead    FILE...       run these inputs once each and stop
//   --write-seeds DIR   write the seeds as files, a first corpus for libFuzzer, and stop
// On a finding it writes the input to `crash-<target>.bin` in the working directory, says what was thrown and exits with 1. A crash or
// sanitizer abort ends the process, so the input about to run is also kept in that file while it runs when --keep is given.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "models/error.hpp"

namespace loopgauge::fuzz {

using Bytes = std::vector<std::uint8_t>;
using Target = std::function<void(std::span<const std::uint8_t>)>;

// splitmix64: the whole run is a function of the seed.
class Generator {
 public:
  explicit Generator(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  std::size_t below(std::size_t bound) { return static_cast<std::size_t>(next() % bound); }

 private:
  std::uint64_t state_;
};

// One random change: bits, bytes, numbers (binary and decimal), cut, grown, moved and spliced ranges. Half of the changes fall into the
// first 512 bytes, where formats keep their headers.
inline void mutate(Bytes& bytes, const Bytes& other, Generator& random) {
  constexpr std::size_t kLargest = 1 << 20;
  if (bytes.empty()) bytes.push_back(static_cast<std::uint8_t>(random.next()));
  const std::size_t reach = random.below(2) == 0 ? std::min<std::size_t>(bytes.size(), 512) : bytes.size();
  const std::size_t at = random.below(reach);
  const auto position = [&](std::size_t offset) { return bytes.begin() + static_cast<std::ptrdiff_t>(offset); };
  const std::size_t length = std::min(bytes.size() - at, std::size_t{1} + random.below(32));
  switch (random.below(10)) {
    case 0:
      bytes[at] ^= static_cast<std::uint8_t>(1u << random.below(8));
      break;
    case 1:
      bytes[at] = static_cast<std::uint8_t>(random.next());
      break;
    case 2: {  // a little-endian number near a limit
      constexpr std::uint64_t kLimits[] = {0, 1, 0x7f, 0xff, 0x7fff, 0xffff, 0x7fffffff, 0xffffffff, 0x7fffffffffffffff, ~std::uint64_t{0}};
      const std::uint64_t value = kLimits[random.below(std::size(kLimits))] + random.below(3) - 1;
      std::memcpy(bytes.data() + at, &value, std::min(bytes.size() - at, std::size_t{1} << random.below(4)));
      break;
    }
    case 3: {  // a decimal number: replaces the next run of digits
      const auto digit = [](std::uint8_t c) { return c >= '0' && c <= '9'; };
      const auto begin = std::find_if(position(at), bytes.end(), digit);
      const auto end = std::find_if_not(begin, bytes.end(), digit);
      constexpr const char* kNumbers[] = {
          "0", "1", "2", "-1", "7", "64", "65536", "4294967296", "9223372036854775807", "18446744073709551615", "1e400", "0.5"};
      const std::string number = random.below(2) == 0 ? kNumbers[random.below(std::size(kNumbers))] : std::to_string(random.below(1000));
      const auto inserted = bytes.erase(begin, end);
      bytes.insert(inserted, number.begin(), number.end());
      break;
    }
    case 4:
      bytes.erase(position(at), position(at + length));
      break;
    case 5:
      bytes.resize(at);
      break;
    case 6: {
      const Bytes copy(position(at), position(at + length));
      const auto target = position(random.below(bytes.size() + 1));
      bytes.insert(target, copy.begin(), copy.end());
      break;
    }
    case 7:
      if (!other.empty()) {  // the other's tail after this one's head
        const std::size_t cut = random.below(other.size());
        bytes.resize(at);
        bytes.insert(bytes.end(), other.begin() + static_cast<std::ptrdiff_t>(cut), other.end());
      }
      break;
    case 8: {
      constexpr const char* kTokens[] = {
          "{", "}", "[", "]", ",", ":", "\"", "null", "true", "\\u0000", "\\ud800", "[[[[[[[[[[[[[[[[[[[[", "{\"a\":"};
      const std::string token = kTokens[random.below(std::size(kTokens))];
      bytes.insert(position(at), token.begin(), token.end());
      break;
    }
    default: {
      const std::size_t from = random.below(bytes.size() - length + 1);
      std::memmove(bytes.data() + at, bytes.data() + from, length);
      break;
    }
  }
  if (bytes.size() > kLargest) bytes.resize(kLargest);
}

// Runs the target once. Empty when it behaved, else what it threw.
inline std::string finding(const Target& target, const Bytes& bytes) {
  try {
    target(bytes);
  } catch (const Error&) {
    return "";
  } catch (const std::exception& error) {
    return std::string("threw something other than loopgauge::Error: ") + error.what();
  } catch (...) {
    return "threw something that is not an exception";
  }
  return "";
}

inline int fuzz_main(int argc, char** argv, std::vector<Bytes> seeds, Target target) {
  double seconds = 60;
  std::uint64_t seed = 1, runs = std::numeric_limits<std::uint64_t>::max();
  bool keep = false;
  std::vector<std::string> files;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const bool has_value = i + 1 < argc;
    if (argument == "--seconds" && has_value) {
      seconds = std::atof(argv[++i]);
    } else if (argument == "--seed" && has_value) {
      seed = std::strtoull(argv[++i], nullptr, 10);
    } else if (argument == "--runs" && has_value) {
      runs = std::strtoull(argv[++i], nullptr, 10);
    } else if (argument == "--write-seeds" && has_value) {
      for (std::size_t n = 0; n < seeds.size(); ++n) {
        std::ofstream file(std::filesystem::path(argv[i + 1]) / ("seed-" + std::to_string(n)), std::ios::binary);
        file.write(reinterpret_cast<const char*>(seeds[n].data()), static_cast<std::streamsize>(seeds[n].size()));
        if (!file) {
          std::cerr << argv[i + 1] << ": cannot be written\n";
          return 3;
        }
      }
      return 0;
    } else if (argument == "--keep") {
      keep = true;
    } else if (argument.starts_with("-")) {
      std::cerr << "unknown argument " << argument << "; known: --seconds N --seed N --runs N --keep --write-seeds DIR FILE...\n";
      return 2;
    } else {
      files.push_back(argument);
    }
  }
  const std::string crash_file = "crash-" + std::filesystem::path(argv[0]).filename().string() + ".bin";
  const auto save = [&](const Bytes& bytes) {
    std::ofstream(crash_file, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  };
  const auto report = [&](const Bytes& bytes, const std::string& what) {
    save(bytes);
    std::cerr << "finding: " << what << "\ninput kept in " << crash_file << "\n";
    return 1;
  };
  for (const std::string& file : files) {
    std::ifstream stream(file, std::ios::binary);
    if (!stream) {
      std::cerr << file << ": cannot be read\n";
      return 3;
    }
    const Bytes bytes{std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
    if (const std::string what = finding(target, bytes); !what.empty()) return report(bytes, what);
  }
  if (!files.empty()) return 0;

  // The seeds must be good inputs: a reader that refuses everything would pass any amount of fuzzing.
  for (std::size_t i = 0; i < seeds.size(); ++i) {
    try {
      target(seeds[i]);
    } catch (const std::exception& error) {
      return report(seeds[i], "seed " + std::to_string(i) + " is refused: " + error.what());
    }
  }
  if (seeds.empty()) {
    std::cerr << "no seeds\n";
    return 2;
  }
  Generator random(seed);
  const std::size_t seed_count = seeds.size();
  std::vector<Bytes> pool = std::move(seeds);
  std::uint64_t done = 0, accepted = 0;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (done < runs && std::chrono::steady_clock::now() < end) {
    Bytes bytes = pool[random.below(pool.size())];
    const Bytes& other = pool[random.below(pool.size())];
    for (std::size_t changes = std::size_t{1} << random.below(4); changes > 0; --changes) mutate(bytes, other, random);
    if (keep) save(bytes);
    bool refused = false;
    const Target counted = [&](std::span<const std::uint8_t> input) {
      try {
        target(input);
      } catch (...) {
        refused = true;
        throw;
      }
    };
    if (const std::string what = finding(counted, bytes); !what.empty()) return report(bytes, what);
    ++done;
    // An accepted mutant is a new valid input and worth mutating further.
    if (!refused) {
      ++accepted;
      if (pool.size() < seed_count + 256) {
        pool.push_back(std::move(bytes));
      } else {
        pool[seed_count + random.below(256)] = std::move(bytes);
      }
    }
  }
  if (keep) std::filesystem::remove(crash_file);
  std::cout << done << " inputs, " << accepted << " accepted, " << done - accepted << " refused with a sentence, 0 findings (seed " << seed
            << ")\n";
  return done > 0 ? 0 : 1;
}

}  // namespace loopgauge::fuzz

#ifdef LOOPGAUGE_LIBFUZZER
#define LOOPGAUGE_FUZZ_ENTRY(target, seeds)                                           \
  [[maybe_unused]] const auto loopgauge_standalone_seeds = &seeds;                    \
  extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) { \
    try {                                                                             \
      target(std::span<const std::uint8_t>(data, size));                              \
    } catch (const loopgauge::Error&) {                                               \
    }                                                                                 \
    return 0;                                                                         \
  }
#else
#define LOOPGAUGE_FUZZ_ENTRY(target, seeds) \
  int main(int argc, char** argv) { return loopgauge::fuzz::fuzz_main(argc, argv, seeds(), target); }
#endif
