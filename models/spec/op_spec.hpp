// SPDX-License-Identifier: Apache-2.0
// One operation of the specification as data. models/SPEC.md is the same contract in prose.
#pragma once

#include <array>
#include <cstddef>
#include <initializer_list>
#include <string_view>

#include "models/spec/tolerance.hpp"

namespace loopgauge::spec {

// A constexpr list with its elements inside. A list longer than its capacity does not compile.
template <class T, std::size_t Capacity>
class List {
 public:
  constexpr List() = default;
  constexpr List(std::initializer_list<T> items) {
    for (const T& item : items) items_.at(size_++) = item;
  }
  constexpr const T* begin() const { return items_.data(); }
  constexpr const T* end() const { return items_.data() + size_; }
  constexpr std::size_t size() const { return size_; }
  constexpr bool empty() const { return size_ == 0; }
  constexpr const T& operator[](std::size_t i) const { return items_.at(i); }

 private:
  std::array<T, Capacity> items_{};
  std::size_t size_ = 0;
};

using Words = List<std::string_view, 12>;

struct InputSpec {
  std::string_view name{};
  std::string_view shape{};  // axis letters of TERMINOLOGY.md, slowest first, "M, C"; "" for a scalar
  Format format = Format::bf16;
  std::string_view layout{};  // "row-major", or what an index means
};

struct OutputSpec {
  std::string_view name{};
  std::string_view shape{};
  Format format = Format::bf16;
  std::string_view layout{};
  Words taps{};           // TapPoint::operation names under which rows of this output are observed; empty: not observed
  Tolerance tolerance{};  // between the executors of this repository, given equal inputs
  // Where `tolerance` is bit_exact because both sides keep the declared order or sequence of operations: the limit for an executor that
  // does not (the reordered profile is one). bit_exact: there is none, nothing is summed or approximated.
  Tolerance relaxed{};
};

enum class Determinism {
  exact,            // nothing is summed: any correct executor gives the same bits
  batch_invariant,  // sums: executors may differ within the tolerance, one executor gives a row the same bits in every batch, order and run
};

constexpr std::string_view to_string(Determinism determinism) { return determinism == Determinism::exact ? "exact" : "batch_invariant"; }

struct OpSpec {
  std::string_view name{};      // base name of the files on both sides
  std::string_view equation{};  // one line
  Words clauses{};              // ids of SPEC.md
  Words axes{};                 // letters used in the shapes
  List<InputSpec, 8> inputs{};
  List<OutputSpec, 5> outputs{};
  std::string_view accumulator{};      // format of intermediate sums, "none" without sums
  Words rounding_points{};             // in order
  std::string_view reduction_order{};  // of the reference; "none"
  std::string_view special_values{};   // NaN, infinities, zeros, subnormals
  std::string_view ties{};             // "none" where nothing is chosen
  Determinism determinism = Determinism::exact;

  // Files from the repository root. An empty optimized_sources or equivalence_tests needs a reason in `gap`.
  std::string_view reference_source{};
  Words optimized_sources{};
  Words equivalence_tests{};
  std::string_view gap{};
};

}  // namespace loopgauge::spec
